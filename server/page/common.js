/* The page's script, part 1 of 10: what all views use. Small helpers, requests to the server, the API key,
 * and what is said when something went wrong.
 *
 * The parts are joined to one script when the server is built, in the order of server/api/page.c. Names
 * begin with their part, as in the C files. All text from the server goes into the page as text, never
 * as HTML. */
"use strict";

/* ---- elements ------------------------------------------------------------------------------- */

const $ = (id) => document.getElementById(id);

/* make("p", {className: "hint"}, "text", element, ...). */
function make(name, properties, ...children) {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children.filter((child) => child !== null));
    return element;
}

function show(element, isShown) {
    element.hidden = !isShown;
}

/* A table that is moved sideways where it is too wide, by the keyboard too. rows: its tr elements. */
function wideTable(name, head, rows) {
    return make("div", { className: "wide", tabIndex: 0, role: "region", ariaLabel: name }, make("table", {},
        make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col", textContent: text })))),
        make("tbody", {}, ...rows)));
}

/* A field's number; undefined if it is empty, which JSON.stringify leaves out. */
function numberIn(id) {
    const text = $(id).value.trim();
    return text === "" ? undefined : Number(text);
}

/* Seeds have 64 bits, more than a number in JavaScript: this goes into the JSON as it was typed. */
function seedIn(id) {
    const text = $(id).value.trim();
    if (text !== "" && !/^[0-9]{1,20}$/.test(text)) {
        throw new Trouble("The seed is not a number.", "Give a whole number from 0, or leave it empty.");
    }
    return text;
}

function withSeed(body, seed) {
    const json = JSON.stringify(body);
    return seed === "" ? json : json.slice(0, -1) + ',"seed":' + seed + "}";
}

/* ---- numbers for readers -------------------------------------------------------------------- */

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/* About three digits. */
function short(x) {
    if (x === null || x === undefined || Number.isNaN(x)) {
        return "–";
    }
    const size = Math.abs(x);
    if (Number.isInteger(x) && size < 1e9) {
        return whole.format(x);
    }
    if (size >= 1e9) {
        return x.toExponential(2).replace("e+", " · 10^");
    }
    return size >= 1000 ? whole.format(x)
        : size >= 100 ? x.toFixed(0)
        : size >= 10 ? x.toFixed(1)
        : size >= 0.01 ? x.toFixed(2)
        : x.toExponential(1).replace("e", " · 10^");
}

function percent(share) {
    const p = 100 * share;
    return (p >= 99.95 ? "100" : p >= 10 ? p.toFixed(1) : p >= 0.01 ? p.toFixed(2)
        : p > 0 ? "below 0.01" : "0") + " %";
}

function seconds(s) {
    return s === null ? "–" : s >= 10 ? s.toFixed(0) + " s" : s >= 1 ? s.toFixed(1) + " s"
        : (1000 * s).toFixed(s >= 0.01 ? 0 : s >= 0.001 ? 1 : 2) + " ms";
}

function many(n, one, more) {
    return whole.format(n) + " " + (n === 1 ? one : more || one + "s");
}

/* ---- what went wrong ------------------------------------------------------------------------ */

/* what: one sentence for the reader. why: what can be done, often the server's own words. */
class Trouble extends Error {
    constructor(what, why, status) {
        super(what);
        this.what = what;
        this.why = why || "";
        this.status = status || 0;
    }
}

function troubleShow(error) {
    if (error.name === "AbortError") {
        return;
    }
    const known = error instanceof Trouble;
    $("trouble-what").textContent = known ? error.what : "The page has failed.";
    $("trouble-why").textContent = known ? error.why : String(error);
    show($("trouble"), true);
}

function troubleHide() {
    show($("trouble"), false);
}

/* ---- the key -------------------------------------------------------------------------------- */

/* sessionStorage belongs to the tab; where it is switched off the key lives as long as the page. */
const KEY_NAME = "pkmserve-key";
let keyText = "";
try {
    keyText = sessionStorage.getItem(KEY_NAME) || "";
} catch (error) {
    keyText = "";
}

function keySet(text) {
    keyText = text;
    try {
        if (text === "") {
            sessionStorage.removeItem(KEY_NAME);
        } else {
            sessionStorage.setItem(KEY_NAME, text);
        }
    } catch (error) {
        /* it is in keyText */
    }
    show($("forget"), text !== "");
}

/* Asks for a key, since the server did of a request with this one. Not again while somebody types it, nor
 * because of a request that was sent before they did. */
function keyAsk(used) {
    if (used !== keyText || (used === "" && !$("key-form").hidden)) {
        return;
    }
    const refused = keyText !== "";
    keySet("");
    show($("key-form"), true);
    $("key-form").classList.toggle("refused", refused);
    $("key-form").querySelector("label").textContent = refused
        ? "The server refused the key. Give another one"
        : "This server asks for an API key";
    $("key").value = "";
    $("key").focus();
}

/* ---- requests ------------------------------------------------------------------------------- */

/* What the server says about an error: its own words, whatever the dialect. */
async function serverError(answer) {
    let message = "";
    let code = "";
    try {
        const body = await answer.json();
        const error = body.error || {};
        message = typeof error === "string" ? error : error.message || "";
        code = error.code || "";
    } catch (error) {
        message = "status " + answer.status;
    }
    const after = answer.headers.get("Retry-After");
    const again = after ? " Try again in " + many(Number(after), "second") + "." : "";
    const what = answer.status === 401 ? "The server asks for a valid API key."
        : answer.status === 429 ? "The server is busy and took no further request."
        : code === "model_loading" ? "The model is still being loaded."
        : answer.status === 503 ? "The server takes no work now."
        : code === "route_not_found" ? "That is not at this port."
        : answer.status === 404 ? "What the request names is not here."
        : answer.status >= 500 ? "The server failed."
        : "The server refused the request.";
    return new Trouble(what, message ? "It says: " + message + "." + again : again, answer.status);
}

let serverIsGone = false;

/* Until the server answers again; /version needs no key and no model. */
async function serverWait() {
    while (serverIsGone) {
        await new Promise((resolve) => setTimeout(resolve, 2000));
        try {
            await fetch("version", { cache: "no-store" });
            serverIsGone = false;
        } catch (error) {
            continue;
        }
        troubleHide();
        document.dispatchEvent(new Event("server-back"));
    }
}

function serverGone() {
    if (!serverIsGone) {
        serverIsGone = true;
        $("state").textContent = "no answer";
        $("state").className = "state bad";
        serverWait();
    }
    return new Trouble("The server does not answer.",
        "It may have been stopped, or the network is gone. This page goes on when it is back.");
}

/* A request; body: JSON text for a POST. Gives the Response, whose status is 2xx, or throws. */
async function ask(path, body, signal) {
    const headers = {};
    const key = keyText;
    if (key !== "") {
        headers.Authorization = "Bearer " + key;
    }
    if (body !== undefined) {
        headers["Content-Type"] = "application/json";
    }
    let answer = null;
    try {
        answer = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body, signal,
            cache: "no-store", credentials: "omit" });
    } catch (error) {
        throw error.name === "AbortError" ? error : serverGone();
    }
    if (!answer.ok) {
        if (answer.status === 401) {
            keyAsk(key);
        }
        throw await serverError(answer);
    }
    return answer;
}

/* What an answer that has begun still gives: the connection may break. */
async function rest(promise) {
    try {
        return await promise;
    } catch (error) {
        throw error.name === "AbortError" ? error : serverGone();
    }
}

/* A seed above 2^53 is kept as text, since a number of JavaScript would round it. Within a string of JSON
 * there is no quote without a backslash before it, so this finds the field alone. */
function parseAnswer(json) {
    return JSON.parse(json.replace(/"seed":(\d{16,20})/g, '"seed":"$1"'));
}

async function askJson(path, body, signal) {
    const answer = await ask(path, body, signal);
    return parseAnswer(await rest(answer.text()));
}

/* The events of a stream, one by one. A stream that ends without [DONE] has broken off. */
async function* askEvents(path, body, signal) {
    const answer = await ask(path, body, signal);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
        const piece = await rest(reader.read());
        if (piece.done) {
            throw new Trouble("The stream broke off.", "The text up to here is shown.");
        }
        buffer += piece.value;
        const events = buffer.split("\n\n");
        buffer = events.pop();
        for (const event of events) {
            if (event === "data: [DONE]") {
                return;
            }
            if (event.startsWith("data: ")) {
                const data = parseAnswer(event.slice(6));
                if (data.error) {
                    throw new Trouble("The server failed while it was writing.",
                        "It says: " + (data.error.message || data.error) + ".");
                }
                yield data;
            }
        }
    }
}

/* ---- what is served ------------------------------------------------------------------------- */

/* Filled by main.js before a view starts. port: "main", "admin", or "all" where there is one port alone; ""
 * is not known yet. info: the answer of /info; null at the admin port, which has none. */
const served = { info: null, version: "", port: "" };

function memoriesServed() {
    return served.info ? served.info.model.memories : [];
}

function memoryName(m) {
    const memory = memoriesServed()[m];
    return "Memory " + m + (memory ? " · layer " + memory.layer : "");
}

/* The text of a field as requests take it: without a tokenizer it must be token ids. */
function inputIn(id) {
    const text = $(id).value;
    if (served.info.model.tokenizer !== null) {
        return text;
    }
    const ids = text.split(/[\s,]+/).filter((each) => each !== "").map(Number);
    if (!ids.every((each) => Number.isInteger(each) && each >= 0)) {
        throw new Trouble("This model has no tokenizer.", "Give token ids: whole numbers with blanks between them.");
    }
    return ids;
}
