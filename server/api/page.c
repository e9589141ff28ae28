/* GET /ui, and / for browsers: the page and its files. See page.h. */
#include "server/api/page.h"

#include "server/api/embed.h"

#include <string.h>

EMBED(page_html, EMBED_FILE("server/page/page.html"));
EMBED(page_css, EMBED_FILE("server/page/page.css"));
EMBED(page_icon, EMBED_FILE("server/page/icon.svg"));
/* One script: the parts share their names, and main.js, the last, starts what the others define. */
EMBED(page_js, EMBED_FILE("server/page/common.js") EMBED_FILE("server/page/tokens.js")
                   EMBED_FILE("server/page/plot.js") EMBED_FILE("server/page/write.js")
                       EMBED_FILE("server/page/score.js") EMBED_FILE("server/page/trace.js")
                           EMBED_FILE("server/page/memory.js") EMBED_FILE("server/page/compare.js")
                               EMBED_FILE("server/page/now.js") EMBED_FILE("server/page/main.js"));

/* Only what this server sends: no inline script or style, no other host, no frame around the page,
 * and no text that becomes HTML. */
static const char page_policy[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'";

static void page_send(struct exchange *x, const char *type, const char *data, uint64_t bytes)
{
    text_add(&x->out, data, (size_t)bytes);
    if (x->out.failed) {
        exchange_refuse(x, 500, "out_of_memory", NULL, "no memory for the page");
        return;
    }
    x->status = 200;
    x->content_type = type;
    exchange_header(x, "Content-Security-Policy", "%s", page_policy);
    exchange_header(x, "X-Content-Type-Options", "nosniff");
    exchange_header(x, "Referrer-Policy", "no-referrer");
    exchange_header(x, "Cache-Control", "no-cache"); /* another version may answer the next
                                                      * request */
}

bool page_is_wanted(const struct server *server, const struct exchange *x)
{
    return server->options->ui && x->wants_html;
}

void page_write(struct exchange *x)
{
    page_send(x, "text/html; charset=utf-8", page_html_begin, page_html_bytes);
}

void api_page(struct server *server, struct exchange *x)
{
    if (!server->options->ui) {
        exchange_refuse(x, 404, "route_not_found", NULL,
                        "there is no %.100s at this port: the page is switched off (--ui off)",
                        x->path);
    } else if (strcmp(x->path, "/ui") == 0) {
        page_write(x);
    } else if (strcmp(x->path, "/ui/page.css") == 0) {
        page_send(x, "text/css; charset=utf-8", page_css_begin, page_css_bytes);
    } else if (strcmp(x->path, "/ui/page.js") == 0) {
        page_send(x, "text/javascript; charset=utf-8", page_js_begin, page_js_bytes);
    } else if (strcmp(x->path, "/ui/icon.svg") == 0) {
        page_send(x, "image/svg+xml", page_icon_begin, page_icon_bytes);
    } else {
        exchange_refuse(x, 404, "route_not_found", NULL,
                        "there is no %.100s at this port; the page is at /ui", x->path);
    }
}
