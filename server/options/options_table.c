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
#define LEVEL(f, n, c, d, list, h)                                                                 \
    {                                                                                              \
        f, OPTION_LEVEL, offsetof(struct options, n), c, d, 0, 0, list, 0, h                       \
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
    COUNT = COMMAND_MEMORY_COUNT,
    ADD = COMMAND_MEMORY_ADD,
    RANK = COMMAND_MEMORY_RANK,
    HOT = COMMAND_MEMORY_HOT,
    MEMORY_INSPECT = COMMAND_MEMORY_INSPECT,
    DIFF = COMMAND_MEMORY_DIFF,
    APPLY = COMMAND_MEMORY_APPLY,
    EXAMPLES = COMMAND_MEMORY_EXAMPLES,
    READ = COUNT | EXAMPLES,               /* commands that read texts as score does, for slots */
    RUN = SERVE | SCORE | GENERATE | READ, /* commands that start an engine */
    ALL = RUN | INSPECT | BENCH | COMPARE,
};

const struct option_row option_rows[] = {
    TEXT("model", model, ALL | MEMORY_INSPECT, "",
         "The model directory. Without it, the model shipped with the program."),
    TEXT("tokenizer", tokenizer, RUN | INSPECT | COMPARE, "",
         "The vocabulary file, of the kind that config.json names, or else SentencePiece or "
         "byte-level BPE. Without it, vocab.txt, tokenizer.model or tokenizer.json in the "
         "model directory."),
    TEXT("served-model-name", served_model_name, SERVE | SCORE, "",
         "The model's name in requests and answers, at most 96 bytes. Without it, the last "
         "part of the model's path."),
    CHOICE("device", device, ALL, "auto", "auto|cpu|cuda|ref",
           "Where to compute. auto uses a GPU if there is one; ref is the slow specification "
           "in plain C."),
    TEXT("gpu", gpu, ALL, "",
         "Which GPU: its number, or the bus id that nvidia-smi shows. Without it, the first of "
         "those "
         "that CUDA_VISIBLE_DEVICES leaves."),
    SWITCH("deterministic", deterministic, RUN | BENCH | COMPARE, "on",
           "on: the same request always gives the same bits. off: faster matrix products on a "
           "GPU, but results then depend on the requests that share a step."),
    CHOICE("dtype", dtype, ALL, "auto", "auto|f32|bf16|int8|f16",
           "The type of the weights during computation. auto uses bf16 for bf16 files, int8 "
           "for int8 files on the CPU, f16 for f16 files on a GPU, and for all others f32 on the "
           "CPU and bf16 on a GPU. int8 is for the CPU alone, f16 for a GPU."),
    CHOICE(
        "kv-cache-dtype", kv_cache_dtype, ALL, "auto", "auto|f32|bf16",
        "The type of cached keys and values. auto uses f32 together with f32 weights, or where a "
        "head has an odd number of columns, and bf16 otherwise."),
    FLAG("force-int8", force_int8, ALL,
         "Convert weights to int8 even if that changes one of them by more than 3 %."),
    INT("threads", threads, ALL, "0", 0, 256,
        "The number of compute threads. 0 starts one for each available core."),
    CHOICE("memory-placement", memory_placement, ALL, "auto", "auto|device|host|mmap",
           "Where the value tables of memory layers are kept. mmap reads the file in place "
           "(CPU only); host is pinned memory that a GPU reads. auto uses mmap on the CPU and "
           "device on a GPU."),
    CHOICE("memory-trace", memory_trace, SERVE, "on", "off|summary|on",
           "What requests may ask for about the memories: nothing, summaries alone, or also the "
           "slots of each token."),
    SWITCH("memory-counts", memory_counts, SERVE, "off",
           "on: count how often each memory slot is read, for GET /memory/counts at the "
           "--admin-port. The counts hold numbers alone and nothing of any text."),
    LEVEL("check", check, ALL, "off", "off|on|full",
          "Refuse weights that contain NaN or infinity. serve also loads the model, tests it, "
          "prints /info and exits. full also compares the files with the sums in the model's "
          "model.sha256. Without a value it is on."),

    INT("max-model-len", max_model_len, RUN, "0", 0, 1 << 20,
        "The longest sequence, in positions. 0 uses the model's context, if it has one."),
    INT("max-seqs", max_seqs, RUN, "32", 1, 1024,
        "The number of sequences that run at the same time."),
    INT("max-batch-tokens", max_batch_tokens, RUN, "0", 0, 16384,
        "The number of rows (tokens) in one step. 0 is 512 on the CPU, and on a GPU 512 to 8192, "
        "32 for each of its multiprocessors."),
    LONG("kv-tokens", kv_tokens, RUN, "0", 0, 1e9,
         "The number of positions in the KV cache. 0 reserves max-seqs times the context, or "
         "less if memory is short."),
    INT("bulk-step-ms", bulk_step_ms, SERVE, "50", 0, 60000,
        "The target time of a step that mixes bulk with interactive work, or prompts with the "
        "tokens of other clients; bulk work alone may take twice as long. 0 sets no target."),
    CHOICE("prefix-cache", prefix_cache, RUN, "on", "on|off|shared",
           "Compute equal beginnings of texts only once; results stay the same. on: with API "
           "keys, each key has its own cache. shared: all keys share one, so the time of an "
           "answer can reveal what another key's holder has sent."),
    INT("max-queue", max_queue, SERVE, "128", 1, 65536,
        "The number of requests that may wait. Further ones get status 429."),
    LONG("max-queue-tokens", max_queue_tokens, SERVE, "1048576", 1, 1e12,
         "The number of positions that may wait to be computed: prompts plus max_tokens, or "
         "all windows of a text. Further requests get status 429."),
    LONG("max-request-bytes", max_request_bytes, SERVE, "1073741824", 1 << 16, 1e15,
         "The memory that the tokens and results of all requests may take until they are read. "
         "Further requests get status 429."),
    LONG("max-trace-bytes", max_trace_bytes, SERVE, "67108864", 0, 1LL << 40,
         "The most bytes of slots and weights that the answer to one request with \"memory\": "
         "\"slots\" may have."),
    LONG("memory-trace-bytes", memory_trace_bytes, SERVE, "268435456", 0, 1LL << 40,
         "The memory for the traces of requests with the field memory, reserved at start. "
         "Requests wait until there is enough of it, and none may need more."),
    TEXT("overlay-dir", overlay_dir, SERVE, "",
         "Read each NAME.safetensors of this directory at start as the overlay NAME: rows that a "
         "request with \"overlay\": \"NAME\" reads in place of the memories' own."),
    LONG("overlay-bytes", overlay_bytes, SERVE | SCORE | COMPARE | GENERATE, "268435456", 65536,
         1LL << 40,
         "The memory for all overlays, reserved where --admin-port, --overlay-dir or --overlay is "
         "given; also the longest file that PUT /memory/overlays/NAME takes."),
    INT("max-logprobs", max_logprobs, SERVE, "20", 0, 1000,
        "The number of alternative tokens that a request may ask for."),

    INT("max-items", max_items, SERVE, "64", 1, 4096,
        "The number of prompts in one generation request."),
    INT("max-score-items", max_score_items, SERVE, "256", 1, 65536,
        "The number of documents in one /score request."),
    LONG("max-score-tokens", max_score_tokens, SERVE, "262144", 1, 1e9,
         "The number of tokens in one /score request."),
    LONG("max-score-positions", max_score_positions, SERVE, "0", 0, 1e12,
         "The number of positions that one /score request may make the server compute, "
         "counting overlaps of windows. 0 is 64 times max-score-tokens."),
    LONG("max-body-bytes", max_body_bytes, SERVE, "8388608", 1024, 1 << 30,
         "The longest request body. A longer one gets status 413."),
    INT("default-max-tokens", default_max_tokens, SERVE, "128", 1, 1 << 20,
        "max_tokens for requests that do not set it."),
    INT("timeout-ms", timeout_ms, SERVE, "600000", 1, 86400000,
        "The time that a request may take, including waiting, if it does not set "
        "timeout_ms."),
    INT("max-timeout-ms", max_timeout_ms, SERVE, "3600000", 1, 86400000,
        "The longest timeout_ms that a request may set."),
    FLAG("strict", strict, SERVE | SCORE | GENERATE | READ,
         "Refuse unknown request fields instead of listing them in a header. With --jsonl also: "
         "exit with status 1 if a line has an error."),

    FLAG("echo-bos", echo_bos, SERVE,
         "On /v1/completions, list a BOS token that the server added among the echoed "
         "tokens, as vLLM does. The field echo_bos does this for one request."),

    TEXT("host", host, SERVE | HEALTH, "0.0.0.0",
         "The address to listen on; for health, the address to ask. Use 127.0.0.1 to allow "
         "only this machine."),
    INT("port", port, SERVE | HEALTH, "8000", 0, 65535,
        "The port to listen on; for health, the port to ask. 0 uses a free one."),
    INT("admin-port", admin_port, SERVE, "0", 0, 65535,
        "Serve /metrics and /memory/overlays, and health checks too, on this port. 0 serves "
        "everything on the main port."),
    TEXT("admin-host", admin_host, SERVE, "127.0.0.1",
         "The address on which admin-port listens. It asks for no key, and whoever reaches it can "
         "change what others read: 0.0.0.0 is for networks that keep clients away from it."),
    TEXT("api-key-file", api_key_file, SERVE, "",
         "A file with the accepted API keys, one per line; the names of overlays behind a key, "
         "separated by commas, apply to all its requests. SIGHUP reads it again. Without it "
         "no key is needed."),
    TEXT("cors", cors, SERVE, "",
         "The origin (https://example.org) whose web pages may call the server from a "
         "browser; * allows all. Without it none may."),
    SWITCH("ui", ui, SERVE, "on",
           "Serve a web page at /ui, and at / to browsers. It can do what its visitor's API key "
           "can; off removes it."),
    FLAG("metrics-auth", metrics_auth, SERVE,
         "Require a key for /metrics too. This needs --api-key-file and excludes "
         "--admin-port."),
    CHOICE("metrics-compat", metrics_compat, SERVE, "none", "none|vllm|tgi",
           "Also publish the metrics under the names that this other server uses."),
    INT("max-connections", max_connections, SERVE, "1024", 1, 65536,
        "The number of open connections. A further one takes the place of one that waits for a "
        "request, or whose client sends a body or reads an answer slowly; if there is none, it "
        "gets status 503, but for health checks."),
    INT("max-client-requests", max_client_requests, SERVE, "0", 0, 65536,
        "The number of requests that one API key, or without keys one address, may have in "
        "progress, including uploads. Further ones get status 429. 0 sets no limit."),
    TEXT("trusted-proxies", trusted_proxies, SERVE, "",
         "The addresses of proxies in front of the server, for example 10.0.0.0/8,192.0.2.7. "
         "The server then takes a client's address from their X-Forwarded-For header."),
    LONG("max-buffered-bytes", max_buffered_bytes, SERVE, "268435456", 1048576, 1e12,
         "The memory for all request bodies and answers that are waiting. If it is exceeded, "
         "the server closes the connection that holds most, of the API key whose connections "
         "hold most."),
    INT("min-read-rate", min_read_rate, SERVE, "256", 0, 1 << 30,
        "Close a connection whose client reads an answer more slowly than this, in bytes "
        "per second. 0 allows any rate."),
    INT("read-window-s", read_window_s, SERVE, "30", 1, 3600,
        "The time over which --min-read-rate is measured."),
    INT("body-threads", body_threads, SERVE, "3", 1, 64,
        "The number of threads that read request bodies of 4 KiB and more. The first takes bodies "
        "of any length, others up to 1 MiB, and the last of several up to 64 KiB."),
    CHOICE("overload-status", overload_status, SERVE, "429", "429|503",
           "The status of a refusal due to load. Some load balancers try another server only "
           "on 503."),
    REAL("ping-s", ping_s, SERVE, "15", 0.01, 3600, OPEN_NONE,
         "Send a comment on a stream that has been silent for this long."),
    INT("keepalive-s", keepalive_s, SERVE, "120", 1, 86400,
        "Close a connection that has been idle for this long."),
    INT("header-timeout-s", header_timeout_s, SERVE, "10", 1, 3600,
        "The time for a request's headers to arrive."),
    INT("body-timeout-s", body_timeout_s, SERVE, "30", 1, 3600,
        "The time for a request's body to arrive."),
    INT("stall-ready-s", stall_ready_s, SERVE, "10", 1, 86400,
        "Report the server as not ready if work is pending and no step has ended for this "
        "long."),
    INT("stall-live-s", stall_live_s, SERVE, "120", 1, 86400,
        "Report the server as not alive if work is pending and no step has ended for this "
        "long."),
    INT("drain-delay-s", drain_delay_s, SERVE, "5", 0, 3600,
        "After SIGTERM, keep accepting requests for this long."),
    INT("shutdown-timeout-s", shutdown_timeout_s, SERVE, "30", 0, 3600,
        "After that, the time for running requests to finish and for their answers to be "
        "read."),
    CHOICE("log-format", log_format, SERVE, "text", "text|json", "The format of log lines."),
    CHOICE("log-level", log_level, SERVE, "info", "error|warn|info|debug",
           "The lowest level that is logged."),
    LONG("log-buffer-bytes", log_buffer_bytes, SERVE, "1048576", 8192, 1 << 30,
         "The space for log lines while standard error is blocked. Lines that do not fit are "
         "dropped and counted."),

    FLAG("json", json, SCORE | COMPARE | GENERATE | INSPECT | BENCH | RANK | HOT | MEMORY_INSPECT,
         "Print JSON."),
    FLAG("hash", hash, INSPECT,
         "Print the SHA-256 of each memory's values, which an overlay names as its base: of the "
         "tensor's bytes, then of its scales if it is quantised, then of the experts likewise."),
    FLAG("jsonl", jsonl, SCORE | GENERATE | READ,
         "Each line of the files is one request as POST /score or POST /generate takes it; score "
         "and generate print one answer a line in the same order. Files may be compressed by "
         "gzip or zstd. Options apply to fields that a line does not have."),
    TEXT("output", output, SCORE | GENERATE | COUNT | ADD | RANK | HOT | DIFF | APPLY, "",
         "The file to write, or the directory to make; -o is short for it. score and generate "
         "take it with --jsonl: the file is compressed if its name ends in .gz or .zst, and "
         "errors in lines go to this name with .errors. Without it, answers go to standard "
         "output and errors to standard error."),
    FLAG("resume", resume, SCORE | GENERATE,
         "With --jsonl: continue where an earlier run with the same --output stopped. Files, "
         "model and options must be the same."),
    TEXT("text-field", text_field, SCORE | GENERATE | READ, "",
         "With --jsonl: lines are not requests; take the text from this field, and the field id."),
    TEXT("fields", fields, SCORE, "",
         "With --jsonl: print only these fields of each result, for example "
         "perplexity,bits_per_byte,n_unk."),
    TEXT("shard", shard, SCORE | GENERATE | READ, "",
         "With --jsonl: I/N takes every Nth line, beginning with line I, counted from 0."),
    LONG("max-line-bytes", max_line_bytes, SCORE | GENERATE | READ, "268435456", 1024, 1 << 30,
         "With --jsonl: the longest line. A longer one is an error."),
    FLAG("ids", ids, SCORE | COMPARE | GENERATE | READ,
         "The input, and generated output, consists of token ids."),
    FLAG("memory", memory, SCORE, "Print how the memory layers were used."),
    TEXT("slots", slots, SCORE | EXAMPLES, "",
         "For score: write which memory slots each position read, and their weights, to this "
         ".npz file. For memory examples: the slots to look for, such as 17,99; 2:17 is slot 17 "
         "of memory 2 alone."),
    INT("most", most, EXAMPLES, "50", 1, 10000, "The number of places printed for each slot."),
    INT("max-context", max_context, SCORE | COMPARE | READ, "0", 0, 1 << 20,
        "The number of positions in a scoring window. 0 uses the longest possible."),
    INT("stride", stride, SCORE | COMPARE | READ, "0", 0, 1 << 20,
        "The number of new tokens scored in each window. 0 uses max-context; smaller values "
        "give more context and take longer."),
    CHOICE("add-bos", add_bos, SCORE | COMPARE | READ, "auto", "auto|on|off",
           "Put the beginning-of-text token in front, so that the first token is scored too. "
           "auto does what the model was trained with, and adds none to token ids."),
    FLAG("as-text", as_text, SCORE | COMPARE | READ,
         "Score JSON files as plain text, including braces and names."),
    CHOICE("windows", windows, SCORE | COMPARE, "own",
           "own|lm-eval|xlm|adaptive-span|sparse-memory-lm",
           "Cut texts as this evaluator does, to reproduce the figures that it prints. own "
           "follows --max-context and --stride."),
    INT("bptt", bptt, SCORE | COMPARE, "0", 0, 1 << 20,
        "With --windows: the number of tokens in a window. XLM calls it --bptt, "
        "adaptive-span --block-sz, lm-eval max_length, sparse-memory-lm max_seq_len (0 uses the "
        "model's context for the last two)."),
    INT("batch-size", batch_size, SCORE | COMPARE, "0", 0, 65536,
        "With --windows adaptive-span: the number of rows that the text is cut into, its "
        "--batch-sz. 0 uses one."),
    TEXT("ablate", ablate, SCORE | COMPARE | GENERATE, "",
         "Switch off or scale memories, heads or slots: a JSON list as in the field ablate of "
         "requests, such as '[{\"memory\": 0, \"head\": 1}]'. compare does so in --model alone."),
    TEXT("overlay", overlay, SCORE | COMPARE | GENERATE, "",
         "Read rows of this overlay, a .safetensors file, in place of the memories' own. compare "
         "does so in --model alone."),
    FLAG("ablate-sweep", ablate_sweep, COMPARE,
         "Print perplexity and KL with each memory, and each head of it, switched off in turn: "
         "one row each. --max-kl and --max-worse do not apply."),
    TEXT("against", against, COMPARE, "",
         "The model directory of the reference, computed in f32. Without it, that of "
         "--model."),
    REAL("max-kl", max_kl, COMPARE, "0.01", 0, 1e9, OPEN_NONE,
         "Exit with status 1 if the mean Kullback-Leibler divergence exceeds this, in nats "
         "per token."),
    REAL("max-worse", max_worse, COMPARE, "1", 0, 1e9, OPEN_NONE,
         "Exit with status 1 if perplexity is worse by more than this, in percent."),
    INT("max-tokens", max_tokens, GENERATE, "", 0, 1 << 20,
        "The maximum number of tokens to generate. Without it, 128, or what the context leaves, "
        "whichever is less."),
    INT("min-tokens", min_tokens, GENERATE, "0", 0, 1 << 20,
        "The minimum number of tokens before the text may end."),
    REAL("temperature", temperature, GENERATE, "", 0, 2, OPEN_NONE,
         "0 always takes the most likely token. Without this and the next four options, the "
         "model's generation_config.json decides, or otherwise 1 and no restriction."),
    INT("top-k", top_k, GENERATE, "", -1, 1 << 24,
        "Draw from the k most likely tokens. 0 turns this off."),
    REAL("top-p", top_p, GENERATE, "", 0, 1, OPEN_MIN,
         "Draw from the most likely tokens whose probabilities add up to this."),
    REAL("min-p", min_p, GENERATE, "", 0, 1, OPEN_MAX,
         "Drop tokens less likely than this fraction of the most likely token's probability."),
    REAL("repetition-penalty", repetition_penalty, GENERATE, "", 0, 10, OPEN_MIN,
         "Divide positive logits of tokens that have occurred by this, and multiply negative "
         "ones."),
    REAL("typical-p", typical_p, GENERATE, "1", 0, 1, OPEN_MIN,
         "Draw from the tokens whose log-probabilities are nearest to their mean, as many as "
         "have this much probability together. 1 turns this off."),
    REAL("presence-penalty", presence_penalty, GENERATE, "0", -2, 2, OPEN_NONE,
         "Subtract this from the logits of generated tokens."),
    REAL("frequency-penalty", frequency_penalty, GENERATE, "0", -2, 2, OPEN_NONE,
         "Subtract this from the logits of generated tokens for each time they occurred."),
    TEXT("stop", stop, GENERATE, "", "End the text at this string."),
    FLAG("ignore-eos", ignore_eos, GENERATE, "Do not end at the end-of-text token."),
    {"seed", OPTION_SEED, offsetof(struct options, seed), GENERATE, "", 0, 0, NULL, 0,
     "The seed of the random numbers. Without it a new one is drawn and printed on standard error "
     "at the end."},
    TEXT("language", language, SCORE | COMPARE | GENERATE | READ, "",
         "The name or id of the language, for models with languages."),
    INT("rows", rows, BENCH, "256", 1, 16384, "The number of rows in the prefill measurement."),
    INT("max-batch", max_batch, BENCH, "32", 1, 1024,
        "The largest number of sequences decoded at once. All powers of two up to it are "
        "measured."),
    INT("positions", positions, BENCH, "64", 1, 1 << 20,
        "The number of positions before each decode step."),
    INT("rounds", rounds, BENCH, "5", 0, 1000,
        "The number of rounds; medians are printed. 0 runs one round for each line of "
        "standard input and prints it as a line of JSON."),
    TEXT("background", background, RANK, "",
         "The counts of texts of any kind, with which the task's counts are compared."),
    INT("top", top, RANK, "500", 1, 1 << 30, "The number of slots in the list, of all memories."),
    CHOICE("by", by, RANK, "tfidf", "tfidf|kl",
           "How slots are ranked. tfidf: the slot's share of the task's reads, times the "
           "logarithm of the number of background texts divided by the number of those that read "
           "it. kl: the slot's part of the Kullback-Leibler divergence of the task's reads from "
           "the background's."),
    REAL("share", share, HOT, "0.1", 0, 1, OPEN_MIN,
         "The size of the list of hot slots, as a share of the table's slots."),
    TEXT("counts", counts, MEMORY_INSPECT, "",
         "For an overlay: print how often its slots were read, according to this counts file."),
    TEXT("path", path, HEALTH, "/health/ready", "The path to ask for. Status 200 means healthy."),
    INT("timeout-s", timeout_s, HEALTH, "5", 1, 3600, "The time for the whole check."),
};
const int option_n_row = (int)(sizeof option_rows / sizeof option_rows[0]);

const struct option_command option_commands[] = {
    {"serve", COMMAND_SERVE, "pkmserve serve [DIR] [options]", "serve the model in DIR over HTTP",
     1},
    {"score", COMMAND_SCORE, "pkmserve score [--model DIR] [--jsonl] [options] [FILE... | -]",
     "perplexity of files, as POST /score computes it", INT_MAX},
    {"compare", COMMAND_COMPARE,
     "pkmserve compare [--model DIR] [--dtype T] [--against DIR] [options] [FILE... | -]",
     "what a choice of weights costs: perplexity and KL against f32, refused beyond a bound",
     INT_MAX},
    {"generate", COMMAND_GENERATE,
     "pkmserve generate [--model DIR] [options] [PROMPT | -] | --jsonl [FILE... | -]",
     "continue a prompt, streamed to the terminal, or those of files", INT_MAX},
    {"inspect", COMMAND_INSPECT, "pkmserve inspect [DIR] [--json] [--hash]",
     "what a model is: layers, memories, parameters, bytes", 1},
    {"bench", COMMAND_BENCH, "pkmserve bench [DIR] [options]",
     "tokens per second, and the share of what the machine can do", 1},
    {"memory count", COMMAND_MEMORY_COUNT,
     "pkmserve memory count [--model DIR] [--jsonl] [options] [FILE... | -] -o COUNTS",
     "count which memory slots texts read; each file is a text, or each of its lines", INT_MAX},
    {"memory add", COMMAND_MEMORY_ADD, "pkmserve memory add COUNTS... -o COUNTS",
     "add the counts of several runs", INT_MAX},
    {"memory rank", COMMAND_MEMORY_RANK,
     "pkmserve memory rank COUNTS --background COUNTS [--top N] [--by tfidf|kl] -o SLOTS",
     "list the slots that a task reads more than texts of any kind do", 1},
    {"memory hot", COMMAND_MEMORY_HOT, "pkmserve memory hot COUNTS [--share X] [-o SLOTS]",
     "how unevenly slots are read, and a list of those read most", 1},
    {"memory diff", COMMAND_MEMORY_DIFF, "pkmserve memory diff BASE TUNED -o OVERLAY",
     "the value rows in which two model directories differ, as an overlay of the first", 2},
    {"memory apply", COMMAND_MEMORY_APPLY, "pkmserve memory apply BASE OVERLAY -o DIR",
     "make a model directory with the rows of an overlay in it", 2},
    {"memory examples", COMMAND_MEMORY_EXAMPLES,
     "pkmserve memory examples [--model DIR] --slots N,N [--most N] [--jsonl] [FILE... | -]",
     "print the places in texts where slots have the largest weight, with the words around them, "
     "as JSON",
     INT_MAX},
    {"memory inspect", COMMAND_MEMORY_INSPECT,
     "pkmserve memory inspect FILE [--model DIR] [--counts COUNTS] [--json]",
     "what is in a file of counts or in an overlay", 1},
    {"health", COMMAND_HEALTH, "pkmserve health [URL] [--host HOST] [--port N] [--path PATH]",
     "ask a running server: exit status 0 if it is ready", 1},
};
const int option_n_command = (int)(sizeof option_commands / sizeof option_commands[0]);
