/* Part 10: the views as tabs, what is served, and the start. */

const VIEWS = ["write", "score", "memory", "now"];
const VIEW_START = { write: writeStart, score: scoreStart, memory: memoryStart, now: nowStart };
const AT_ADMIN = "This is the admin port, which tells figures and does no work: open this page at the server's main port to ";
const AT_ADMIN_FOR = { write: "write.", score: "score texts." };

let viewNow = "";
let isStarted = false; /* what is served is known */

function viewBegin() {
    if (!isStarted && (viewNow !== "now" || served.port === "")) {
        return; /* figures are told while the model is loaded */
    }
    const isAdmin = isStarted && served.info === null;
    if (isAdmin && AT_ADMIN_FOR[viewNow]) {
        $("view-" + viewNow).replaceChildren(make("p", { className: "note", textContent: AT_ADMIN + AT_ADMIN_FOR[viewNow] }));
        return;
    }
    VIEW_START[viewNow]();
}

function viewOpen(name) {
    viewNow = VIEWS.includes(name) ? name : "write";
    for (const each of VIEWS) {
        const isOpen = each === viewNow;
        show($("view-" + each), isOpen);
        $("tab-" + each).setAttribute("aria-selected", String(isOpen));
        $("tab-" + each).tabIndex = isOpen ? 0 : -1;
    }
    cardHide();
    if (viewNow !== "now") {
        nowEnd();
    }
    viewBegin();
}

function viewGo(name) {
    if (location.hash === "#" + name) {
        viewOpen(name);
    } else {
        location.hash = name; /* hashchange opens it */
    }
}

/* Opens a view with a text and starts it. */
function viewWith(name, field, text) {
    $(field).value = text;
    viewGo(name);
    setTimeout(() => $(name + "-form").requestSubmit(), 0);
}

function tabKey(event) {
    const at = VIEWS.indexOf(event.target.id.slice("tab-".length));
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1 + VIEWS.length, Home: 0, End: VIEWS.length - 1 }[event.key];
    if (to !== undefined) {
        event.preventDefault();
        $("tab-" + VIEWS[to % VIEWS.length]).focus();
        viewGo(VIEWS[to % VIEWS.length]);
    }
}

/* ---- what is served ------------------------------------------------------------------------- */

function servedShow() {
    const { info } = served;
    $("state").className = "state good";
    $("state").textContent = "pkmserve " + served.version;
    if (info === null) {
        $("served").textContent = "admin port";
        return;
    }
    const { model, backend } = info;
    const memories = model.memories;
    const slots = [...new Set(memories.map((memory) => memory.slots))];
    const size = model.n_param >= 1e9 ? (model.n_param / 1e9).toFixed(1) + " billion"
        : (model.n_param / 1e6).toFixed(1) + " million";
    $("served").replaceChildren(make("b", { textContent: info.model_id }), " " + [size + " parameters",
        memories.length === 0 ? "no memories" : many(memories.length, "memory", "memories") + " of "
            + slots.map((n) => whole.format(n)).join(" or ") + " slots", model.dtype + " on " + backend.name].join(" · "));
}

/* Asks until the model is loaded. At the admin port the page has figures alone. */
async function servedLoad() {
    const answer = await ask("version");
    served.port = answer.headers.get("X-Port");
    served.version = (await rest(answer.json())).version;
    viewBegin();
    while (served.port !== "admin") {
        try {
            served.info = await askJson("info");
            break;
        } catch (error) {
            if (error.status !== 503) {
                throw error;
            }
        }
        const health = await fetch("health/live").then((answer) => answer.json()).catch(() => ({ progress: 0 }));
        $("state").textContent = "loading the model, " + percent(health.progress || 0);
        await new Promise((resolve) => setTimeout(resolve, 500));
    }
    isStarted = true;
    servedShow();
    show($("key-form"), false);
    $("key").value = "";
    troubleHide();
    if (served.info === null && location.hash === "") {
        viewGo("now"); /* all that this port has */
    } else {
        viewBegin();
    }
}

function serverTrouble(error) {
    $("state").textContent = error.status === 401 ? "a key is needed" : "no answer";
    $("state").className = "state bad";
    if (error.status !== 401 || $("key-form").classList.contains("refused")) {
        troubleShow(error);
    }
}

document.addEventListener("server-back", () => servedLoad().catch(serverTrouble));

/* ---- start ---------------------------------------------------------------------------------- */

for (const name of VIEWS) {
    $("tab-" + name).addEventListener("click", () => viewGo(name));
    $("tab-" + name).addEventListener("keydown", tabKey);
}
for (const area of document.querySelectorAll("textarea")) {
    area.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
            event.preventDefault();
            area.form.requestSubmit();
        }
    });
}
window.addEventListener("hashchange", () => viewOpen(location.hash.slice(1)));
$("trouble-close").addEventListener("click", troubleHide);
$("forget").addEventListener("click", () => {
    keySet("");
    location.reload();
});
$("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if ($("key").value.trim() !== "") {
        keySet($("key").value.trim());
        servedLoad().catch(serverTrouble);
    }
});
window.addEventListener("unhandledrejection", (event) => troubleShow(event.reason));
keySet(keyText);
viewOpen(location.hash.slice(1));
servedLoad().catch(serverTrouble);
