/* The option table itself: options_parse.c parses by it and prints help from it. */
#ifndef SERVER_OPTIONS_TABLE_H
#define SERVER_OPTIONS_TABLE_H

#include "server/options/options.h"

enum option_type {
    OPTION_TEXT,   /* const char * */
    OPTION_CHOICE, /* const char *, one of choices */
    OPTION_INT,    /* int */
    OPTION_LONG,   /* int64_t */
    OPTION_SEED,   /* uint64_t, and has_seed */
    OPTION_REAL,   /* double */
    OPTION_SWITCH, /* bool, takes on or off */
    OPTION_FLAG,   /* bool, takes no value on the command line */
    OPTION_LEVEL,  /* const char *, one of choices; alone on the command line it is "on" */
};

/* Which ends of the interval min .. max are excluded (OPTION_REAL). */
enum option_open { OPEN_NONE = 0, OPEN_MIN = 1, OPEN_MAX = 2 };

struct option_row {
    const char *flag; /* without the dashes */
    enum option_type type;
    size_t offset; /* in struct options */
    unsigned commands;
    const char *fallback; /* default, as one would type it; "" for a number: OPTION_NOT_GIVEN */
    double min, max;      /* numbers; integers up to 2^53 are exact */
    const char *choices;  /* OPTION_CHOICE, OPTION_LEVEL: "a|b|c" */
    enum option_open open;
    const char *help;
};

struct option_command {
    const char *name;
    enum command command;
    const char *usage;
    const char *help;
    int n_operand_max;
};

extern const struct option_row option_rows[];
extern const int option_n_row;
extern const struct option_command option_commands[];
extern const int option_n_command;

#endif
