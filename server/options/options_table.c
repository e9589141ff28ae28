/* Every option and sub-command of pkmserve. To add an option: a field in struct options, a row
 * here.
 *
 * The columns of a row: flag, field, commands that take it, default, bounds or choices, help. */
#include "server/options/options_table.h"

#include <limits.h>
#include <stddef.h>

#define TEXT(f, n, c, d, h)                                                                        \
    {                                                                                              \
        f, OPTION_TEXT, offsetof(struct options, n), c, d, 0, 0, NULL, 0, h                        \
    }
#define CHOICE(f, n, c, d, list, h)                                                                \
    {                                                                                              \
        f, OPTION_CHOICE, offsetof(struct options, n), c, d, 0, 0, list, 0, h                      \
    }
#define INT(f, n, c, d, lo, hi, h)                                                                 \
    {                                                                                              \
        f, OPTION_INT, offsetof(struct options, n), c, d, lo, hi, NULL, 0, h                       \
    }
#define LONG(f, n, c, d, lo, hi, h)                                                                \
    {                                                                                              \
        f, OPTION_LONG, offsetof(struct options, n), c, d, lo, hi, NULL, 0, h                      \
    }
#define REAL(f, n, c, d, lo, hi, open, h)                                                          \
    {                                                                                              \
        f, OPTION_REAL, offsetof(struct options, n), c, d, lo, hi, NULL, open, h                   \
    }
#define SWITCH(f, n, c, d, h)                                                                      \
    {                                                                                              \
        f, OPTION_SWITCH, offsetof(struct options, n), c, d, 0, 0, NULL, 0, h                      \
    }
#define FLAG(f, n, c, h)                                                                           \
    {                                                                                              \
        f, OPTION_FLAG, offsetof(struct options, n), c, "off", 0, 0, NULL, 0, h                    \
    }

enum {
    SERVE = COMMAND_SERVE,
    SCORE = COMMAND_SCORE,
    GENERATE = COMMAND_GENERATE,
    INSPECT = COMMAND_INSPECT,
    BENCH = COMMAND_BENCH,
    HEALTH = COMMAND_HEALTH,
    COMPARE = COMMAND_COMPARE,
    RUN = SERVE | SCORE | GENERATE, /* commands that start an engine */
    ALL = RUN | INSPECT | BENCH | COMPARE,
};

const struct option_row option_rows[] = {
    TEXT("model", model, ALL, "", "model directory; without it the one shipped with the program"),
    TEXT("tokenizer", tokenizer, RUN | INSPECT | COMPARE, "",
         "vocabulary of the kind that config.json names, else SentencePiece or byte-level BPE; "
         "without it vocab.txt, tokenizer.model or tokenizer.json of the model directory"),
    TEXT("served-model-name", served_model_name, SERVE | SCORE, "",
         "name in requests and answers, at most 96 bytes; without it the last part of the model's "
         "path"),
    CHOICE("device", device, ALL, "auto", "auto|cpu|cuda|ref",
           "where to compute; auto takes the GPU where there is one; ref is the slow plain-C "
           "specification"),
    SWITCH("deterministic", deterministic, RUN | BENCH | COMPARE, "on",
           "same request, same bits; off lets matrix products of a GPU be faster, and results then "
           "depend on the requests that share a step"),
    CHOICE(
        "dtype", dtype, ALL, "auto", "auto|f32|bf16|int8",
        "weights as computed with; auto takes bf16 for bf16 files, int8 for int8 files (CPU), f32 "
        "for all others"),
    CHOICE("kv-cache-dtype", kv_cache_dtype, ALL, "auto", "auto|f32|bf16",
           "keys and values of earlier positions; auto takes bf16 beside bf16 and int8 weights"),
    FLAG("force-int8", force_int8, ALL,
         "make int8 weights even where that changes one by more than 3 %"),
    INT("threads", threads, ALL, "0", 0, 256, "compute threads; 0 = one per available core"),
    CHOICE(
        "memory-placement", memory_placement, ALL, "auto", "auto|device|host|mmap",
        "where value tables live; mmap reads the file in place (CPU), host is pinned memory that "
        "a GPU reads; auto takes mmap on the CPU, device on a GPU"),
    SWITCH("memory-trace", memory_trace, SERVE, "on", "allow memory telemetry in requests"),
    FLAG("check", check, ALL,
         "refuse NaN and infinity in the weights; serve: also load, self-test, print /info, exit"),

    INT("max-model-len", max_model_len, RUN, "0", 0, 1 << 20,
        "longest sequence in positions; 0 = the model's context, if it has one"),
    INT("max-seqs", max_seqs, RUN, "32", 1, 1024, "sequences that run at once"),
    INT("max-batch-tokens", max_batch_tokens, RUN, "512", 1, 16384, "rows of one step"),
    LONG("kv-tokens", kv_tokens, RUN, "0", 0, 1e9,
         "positions in the cache; 0 = max-seqs times the context, less if memory is short"),
    INT("bulk-step-ms", bulk_step_ms, SERVE, "50", 0, 60000,
        "time aimed at for a step that bulk work shares with running generations, so that they go "
        "on quickly; twice that without generations; 0 = any time"),
    CHOICE("prefix-cache", prefix_cache, RUN, "on", "on|off|shared",
           "compute equal beginnings of texts once; results stay the same. on: where there are API "
           "keys, within the texts of each key; shared: within all texts, so that the time of an "
           "answer can tell one key's holder what another one has sent"),
    INT("max-queue", max_queue, SERVE, "128", 1, 65536, "requests that may wait; more get 429"),
    LONG("max-queue-tokens", max_queue_tokens, SERVE, "1048576", 1, 1e12,
         "positions that may wait to be computed: prompts plus max_tokens, or all windows of a "
         "text; more get 429"),
    INT("max-logprobs", max_logprobs, SERVE, "20", 0, 1000, "alternatives a request may ask for"),

    INT("max-items", max_items, SERVE, "64", 1, 4096, "prompts of one generation"),
    INT("max-score-items", max_score_items, SERVE, "256", 1, 65536, "documents of one /score"),
    LONG("max-score-tokens", max_score_tokens, SERVE, "262144", 1, 1e9, "tokens of one /score"),
    LONG("max-score-positions", max_score_positions, SERVE, "0", 0, 1e12,
         "positions that one /score may make the server compute: all windows with their overlaps; "
         "0 = 64 times max-score-tokens"),
    LONG("max-body-bytes", max_body_bytes, SERVE, "8388608", 1024, 1 << 30,
         "longest request body; more gets 413"),
    INT("default-max-tokens", default_max_tokens, SERVE, "128", 1, 1 << 20,
        "max_tokens of requests that do not say"),
    INT("timeout-ms", timeout_ms, SERVE, "600000", 1, 86400000,
        "time a request may take, waiting included, if it does not say"),
    INT("max-timeout-ms", max_timeout_ms, SERVE, "3600000", 1, 86400000,
        "longest timeout_ms a request may ask for"),
    FLAG("strict", strict, SERVE, "answer unknown request fields with 400 instead of a header"),

    FLAG("echo-bos", echo_bos, SERVE,
         "on /v1/completions list a BOS that the server put in front among the echoed tokens, as "
         "vLLM does; the field echo_bos does so for one request"),

    TEXT("host", host, SERVE | HEALTH, "0.0.0.0",
         "address to listen on, of health to ask; 127.0.0.1 for this machine only"),
    INT("port", port, SERVE | HEALTH, "8000", 0, 65535,
        "port to listen on, of health to ask; 0 takes a free one"),
    INT("admin-port", admin_port, SERVE, "0", 0, 65535,
        "serve /metrics there instead, and health; 0 = at the port of all else"),
    TEXT("api-key-file", api_key_file, SERVE, "",
         "keys that requests must bring, one per line; read again on SIGHUP; without it no key"),
    TEXT("cors", cors, SERVE, "",
         "origin (https://example.org) whose web pages may call the server from a browser; * for "
         "all; without it none may"),
    FLAG("metrics-auth", metrics_auth, SERVE,
         "ask for a key at /metrics too; needs --api-key-file, and there is none at --admin-port"),
    CHOICE("metrics-compat", metrics_compat, SERVE, "none", "none|vllm|tgi",
           "also give the metrics under the names of this server"),
    INT("max-connections", max_connections, SERVE, "1024", 1, 65536,
        "open connections; more get 503"),
    INT("max-client-requests", max_client_requests, SERVE, "0", 0, 65536,
        "requests that one key, or without keys one address, may have under way, uploads among "
        "them; more get 429; 0 = no limit"),
    TEXT("trusted-proxies", trusted_proxies, SERVE, "",
         "addresses of the proxies in front, like 10.0.0.0/8,192.0.2.7: the address that they name "
         "in "
         "X-Forwarded-For then counts as a client"),
    LONG("max-buffered-bytes", max_buffered_bytes, SERVE, "268435456", 1048576, 1e12,
         "memory of all bodies and answers that wait to be read; above it the connection that "
         "holds most "
         "is ended, of the API key whose connections hold most"),
    INT("min-read-rate", min_read_rate, SERVE, "256", 0, 1 << 30,
        "bytes per second that the reader of an answer must take while there is more for it, or "
        "the "
        "connection is closed; 0 = any"),
    INT("read-window-s", read_window_s, SERVE, "30", 1, 3600,
        "time over which --min-read-rate counts"),
    INT("body-threads", body_threads, SERVE, "2", 1, 64,
        "threads that read bodies from 64 KiB; with more than one, one of them takes none above 1 "
        "MiB"),
    CHOICE("overload-status", overload_status, SERVE, "429", "429|503",
           "status of refusals because of load, for balancers that go elsewhere on one of them"),
    REAL("ping-s", ping_s, SERVE, "15", 0.01, 3600, OPEN_NONE,
         "a stream sends a comment when it had nothing to say for so long"),
    INT("keepalive-s", keepalive_s, SERVE, "120", 1, 86400,
        "an idle connection is closed after it"),
    INT("header-timeout-s", header_timeout_s, SERVE, "10", 1, 3600, "time for a request's headers"),
    INT("body-timeout-s", body_timeout_s, SERVE, "30", 1, 3600, "time for a request's body"),
    INT("stall-ready-s", stall_ready_s, SERVE, "10", 1, 86400,
        "without a step for so long, and work pending, the server is not ready"),
    INT("stall-live-s", stall_live_s, SERVE, "120", 1, 86400,
        "without a step for so long, and work pending, the server is not alive"),
    INT("drain-delay-s", drain_delay_s, SERVE, "5", 0, 3600,
        "after SIGTERM new requests are still taken for so long"),
    INT("shutdown-timeout-s", shutdown_timeout_s, SERVE, "30", 0, 3600,
        "then running requests may take so long to finish, and their answers to be read"),
    CHOICE("log-format", log_format, SERVE, "text", "text|json", "form of the log lines"),
    CHOICE("log-level", log_level, SERVE, "info", "error|warn|info|debug", "least level logged"),
    LONG("log-buffer-bytes", log_buffer_bytes, SERVE, "1048576", 8192, 1 << 30,
         "log lines that may wait while standard error takes none; further lines are dropped and "
         "counted"),

    FLAG("json", json, SCORE | COMPARE | GENERATE | INSPECT | BENCH, "print JSON"),
    FLAG("ids", ids, SCORE | COMPARE | GENERATE, "input (and generated output) is token ids"),
    FLAG("memory", memory, SCORE, "print usage and KL of the memories"),
    INT("max-context", max_context, SCORE | COMPARE, "0", 0, 1 << 20,
        "positions of a scoring window; 0 = the longest possible"),
    INT("stride", stride, SCORE | COMPARE, "0", 0, 1 << 20,
        "new tokens scored per window; 0 = max-context, smaller = more context, slower"),
    CHOICE("add-bos", add_bos, SCORE | COMPARE, "auto", "auto|on|off",
           "put the beginning-of-text token in front, so that the first token is scored too; auto: "
           "as the model was trained, not before token ids"),
    FLAG("as-text", as_text, SCORE | COMPARE,
         "score files of JSON as the text that they are, braces and names included"),
    CHOICE("windows", windows, SCORE | COMPARE, "own", "own|lm-eval|xlm|adaptive-span",
           "cut texts as this evaluator does, to get the figures that it prints; own follows "
           "--max-context and --stride"),
    INT("bptt", bptt, SCORE | COMPARE, "0", 0, 1 << 20,
        "with --windows: tokens of a window by the evaluator's own name for them, --bptt of XLM, "
        "--block-sz of adaptive-span, max_length of lm-eval (0 there = the model's context)"),
    INT("batch-size", batch_size, SCORE | COMPARE, "0", 0, 65536,
        "with --windows adaptive-span: rows that the text is cut into, its --batch-sz; 0 = one"),
    TEXT("against", against, COMPARE, "",
         "model directory of the reference, computed in f32; without it that of --model"),
    REAL("max-kl", max_kl, COMPARE, "0.01", 0, 1e9, OPEN_NONE,
         "mean Kullback-Leibler divergence, in nats per token, beyond which the exit status is 1"),
    REAL("max-worse", max_worse, COMPARE, "1", 0, 1e9, OPEN_NONE,
         "loss of perplexity, in percent, beyond which the exit status is 1"),
    INT("max-tokens", max_tokens, GENERATE, "128", 0, 1 << 20, "tokens to generate at most"),
    INT("min-tokens", min_tokens, GENERATE, "0", 0, 1 << 20, "no end before so many tokens"),
    REAL("temperature", temperature, GENERATE, "", 0, 2, OPEN_NONE,
         "0 = always the likeliest; without it and the next four, what the model's "
         "generation_config.json recommends, else 1, or what leaves the choice alone"),
    INT("top-k", top_k, GENERATE, "", -1, 1 << 24, "draw from the k likeliest; 0 = off"),
    REAL("top-p", top_p, GENERATE, "", 0, 1, OPEN_MIN, "draw from the likeliest of this mass"),
    REAL("min-p", min_p, GENERATE, "", 0, 1, OPEN_MAX,
         "drop tokens below this share of the likeliest one's probability"),
    REAL("repetition-penalty", repetition_penalty, GENERATE, "", 1e-6, 10, OPEN_NONE,
         "divides positive logits of tokens seen, multiplies negative ones"),
    REAL("presence-penalty", presence_penalty, GENERATE, "0", -2, 2, OPEN_NONE,
         "subtracted from the logits of generated tokens"),
    REAL("frequency-penalty", frequency_penalty, GENERATE, "0", -2, 2, OPEN_NONE,
         "the same, times how often they came"),
    TEXT("stop", stop, GENERATE, "", "end at this text"),
    FLAG("ignore-eos", ignore_eos, GENERATE, "do not end at the end token"),
    {"seed", OPTION_SEED, offsetof(struct options, seed), GENERATE, "", 0, 0, NULL, 0,
     "of the random numbers; without it a new one each time, named at the end on standard error"},
    TEXT("language", language, SCORE | COMPARE | GENERATE, "",
         "name or id, for models with languages"),
    INT("rows", rows, BENCH, "256", 1, 16384, "rows of the prefill measurement"),
    INT("max-batch", max_batch, BENCH, "32", 1, 1024,
        "most sequences decoded at once; measured are the powers of two up to it"),
    INT("positions", positions, BENCH, "64", 1, 1 << 20, "positions before each decode step"),
    INT("rounds", rounds, BENCH, "5", 0, 1000,
        "rounds; the medians are printed; 0 = one for each line of standard input, as a line of "
        "JSON"),
    TEXT("path", path, HEALTH, "/health/ready", "route to ask; 200 is healthy"),
    INT("timeout-s", timeout_s, HEALTH, "5", 1, 3600, "time for the whole question"),
};
const int option_n_row = (int)(sizeof option_rows / sizeof option_rows[0]);

const struct option_command option_commands[] = {
    {"serve", COMMAND_SERVE, "pkmserve serve [DIR] [options]", "serve the model in DIR over HTTP",
     1},
    {"score", COMMAND_SCORE, "pkmserve score [--model DIR] [options] [FILE... | -]",
     "perplexity of files, as POST /score computes it", INT_MAX},
    {"compare", COMMAND_COMPARE,
     "pkmserve compare [--model DIR] [--dtype T] [--against DIR] [options] [FILE... | -]",
     "what a choice of weights costs: perplexity and KL against f32, refused beyond a bound",
     INT_MAX},
    {"generate", COMMAND_GENERATE, "pkmserve generate [--model DIR] [options] [PROMPT | -]",
     "continue a prompt, streamed to the terminal", 1},
    {"inspect", COMMAND_INSPECT, "pkmserve inspect [DIR] [--json]",
     "what a model is: layers, memories, parameters, bytes", 1},
    {"bench", COMMAND_BENCH, "pkmserve bench [DIR] [options]",
     "tokens per second, and the share of what the machine can do", 1},
    {"health", COMMAND_HEALTH, "pkmserve health [URL] [--host HOST] [--port N] [--path PATH]",
     "ask the server that listens there: exit status 0 if it is ready", 1},
};
const int option_n_command = (int)(sizeof option_commands / sizeof option_commands[0]);
