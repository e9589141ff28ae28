/* Draws "label  ########........  47 %  1234 tokens/s  0:12 left"; see progress.h. */
#include "server/cli/progress.h"

#include "engine/clock.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { BAR_WIDTH = 30, REDRAW_US = 100000 };

void progress_begin(struct progress *progress, const char *unit, double unit_total)
{
    *progress = (struct progress){
        .shown = isatty(STDERR_FILENO) == 1,
        .begin_us = clock_now_us(),
        .unit = unit,
        .unit_total = unit_total,
    };
}

/* Whether it is time to draw. */
static bool is_due(struct progress *progress)
{
    const int64_t now_us = progress->shown ? clock_now_us() : 0;
    if (!progress->shown || now_us - progress->last_us < REDRAW_US) {
        return false;
    }
    progress->last_us = now_us;
    return true;
}

void progress_count(struct progress *progress, const char *label, int64_t n_document,
                    int64_t n_unit, double share)
{
    const double elapsed_s = (double)(clock_now_us() - progress->begin_us) / 1e6;
    char text[96];
    (void)snprintf(text, sizeof text, "%s, documents: %lld", label, (long long)n_document);
    if (share > 0) {
        progress->unit_total = (double)n_unit / share;
        progress_show(progress, text, share);
    } else if (is_due(progress)) {
        fprintf(stderr, "\r\033[K%s  %.0f %s/s", text, (double)n_unit / elapsed_s, progress->unit);
        (void)fflush(stderr);
    }
}

void progress_show(struct progress *progress, const char *label, double share)
{
    if (!is_due(progress)) {
        return;
    }
    const int64_t now_us = progress->last_us;
    char bar[BAR_WIDTH + 1];
    const int full = (int)(share * (double)BAR_WIDTH);
    memset(bar, '.', BAR_WIDTH);
    memset(bar, '#', (size_t)(full < 0 ? 0 : full > BAR_WIDTH ? BAR_WIDTH : full));
    bar[BAR_WIDTH] = '\0';
    fprintf(stderr, "\r\033[K%s  %s  %3.0f %%", label, bar, 100 * share);
    const double elapsed_s = (double)(now_us - progress->begin_us) / 1e6;
    if (progress->unit && share > progress->from && elapsed_s > 0.5) {
        const double left_s = elapsed_s * (1 - share) / (share - progress->from);
        fprintf(stderr, "  %.0f %s/s  %d:%02d left", progress->unit_total * share / elapsed_s,
                progress->unit, (int)(left_s / 60), (int)left_s % 60);
    }
    fflush(stderr);
}

void progress_end(struct progress *progress)
{
    if (progress->shown && progress->last_us != 0) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
    progress->shown = false;
}

void progress_load(void *ctx, const char *phase, double done)
{
    char label[64];
    snprintf(label, sizeof label, "loading (%s)", phase);
    progress_show(ctx, label, done);
}
