/* Writes the answers of generations piece by piece, in any dialect.
 *
 * A choice, and an event of a stream, is a row of parts: dialect->choice, dialect->event. A part is
 * a function that writes what is short and then, if it likes, opens one list of tokens, the text or
 * the memory trace. The writer walks through what a part has opened, and calls the next part when
 * that is over. Since it can stop after any token, a piece has a bounded size whatever the request
 * was, and neither a choice nor one of its lists is ever in memory as a whole.
 *
 *   parts of /generate    open_choice             list_ids                 list_logprobs   ...
 *   writes                {"index":0,"text":" "   ,"token_ids":[ ]         ,"logprobs":[ ]
 *   the writer                              text                ids                    tokens
 *
 * Used by api_generate.c and the command line for whole answers, and by sse.c for events. */
#ifndef SERVER_GENERATE_WRITER_H
#define SERVER_GENERATE_WRITER_H

#include "server/generate/generate.h"
#include "server/io/answer_memory.h"
#include "server/io/text_stream.h"

/* Writes the entry of a token. */
typedef void generate_put(struct generate_writer *writer, struct text *out,
                          const struct answer_token *token);

/* What a text is made of, in this order. */
enum {
    GENERATE_PROMPT = 1,
    GENERATE_OUTPUT = 2, /* the continuation of a choice that is over */
    GENERATE_NEWS = 4    /* what the event tells of it */
};

struct generate_writer {
    const struct generate_job *job;     /* Borrowed */
    const struct api_limits *limits;    /* Borrowed */
    const struct answer_meta *meta;     /* Borrowed */
    const struct generate_event *event; /* Borrowed; NULL: the answer is whole */
    int item;                           /* the choice: the open one, or else the next */
    generate_part *const *part;         /* the next one of what is open; NULL: nothing is open */
    bool comma;                         /* of the answer, between two pieces */
    int64_t n_before;                   /* characters of the choice's prompt that were written */

    /* What the last part has opened: put, text or memory tells that there is something. */
    generate_put *put;           /* a list */
    unsigned text;               /* a text: what of it is still to come */
    struct answer_memory memory; /* "memory" */
    bool placed;                 /* the list's tokens have their offsets */
    int64_t at, end;             /* the next token, and where to stop: a prompt's come first */
    size_t byte;                 /* of the prompt's text */
    struct answer_walk walk;     /* over the prompt, if needed */
    struct text_stream gen;      /* over the continuation, if needed */
    struct text scratch;         /* of one token; also for the parts' use */
};

void generate_writer_begin(struct generate_writer *writer, const struct generate_job *job,
                           const struct api_limits *limits, const struct answer_meta *meta);
void generate_writer_end(struct generate_writer *writer); /* zeroed is fine */

/* The whole answer of a request whose items all ended well: goes on with it until out holds enough
 * bytes, or is a few thousand above. *done: it is complete. false: what was written is useless. */
bool generate_writer_next(struct generate_writer *writer, struct text *out, size_t enough,
                          bool *done, struct api_error *error);
/* The same at once. */
bool generate_write(struct text *out, const struct generate_job *job,
                    const struct api_limits *limits, const struct answer_meta *meta,
                    struct api_error *error);

/* Opens an event, which must stay as it is until it is written; no other one is open. */
void generate_writer_tell(struct generate_writer *writer, const struct generate_event *event);
/* Goes on with what is open until out holds enough bytes; it is complete when writer.part is
 * NULL. */
bool generate_writer_go(struct generate_writer *writer, struct text *out, size_t enough,
                        struct api_error *error);

/* ---- for the parts -------------------------------------------------------------------------- */

const struct item *generate_writer_item(const struct generate_writer *writer);
/* The tokens that the choice or the event lists, for the two functions below: those of an echoed
 * prompt from number from on, and the new ones. */
struct generate_span {
    int64_t at, end;
};
struct generate_span generate_writer_span(const struct generate_writer *writer, int64_t from);
struct generate_span generate_writer_prompt(const struct generate_writer *writer);
struct generate_span generate_writer_output(const struct generate_writer *writer);

/* Opens a list of these tokens under its name. placed: put asks for offset or fresh; then the
 * prompt's tokens begin with the text's first, or before. false: error. */
bool generate_writer_list(struct generate_writer *writer, struct text *out, const char *name,
                          struct generate_span span, bool placed, generate_put *put,
                          struct api_error *error);
/* The same of ids alone. */
bool generate_writer_ids(struct generate_writer *writer, struct text *out, const char *name,
                         struct generate_span span, struct api_error *error);
/* Opens the text, of GENERATE_PROMPT and so on. */
bool generate_writer_text(struct generate_writer *writer, struct text *out, const char *name,
                          unsigned text, struct api_error *error);

/* Opens "memory" of a choice that is over, if it was requested: its slots from the positions on
 * that the engine read after token n_told - 1, which events have told. */
void generate_writer_memory(struct generate_writer *writer, int n_told);
/* The same as a part of whole answers: all of it. */
generate_part generate_memory_part;
/* The same of an event that does not end the choice: the slots of the positions read since the
 * event of the token before. */
void generate_writer_slots(struct generate_writer *writer, int token);

#endif
