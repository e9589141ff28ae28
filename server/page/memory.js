/* Part 7, the view Memory: which slots each token of a text read, where else a slot was read, and a map of
 * the table. compare.js has its lower half. */

const MEMORY_SHOWN = 6; /* slots of a head, until all are asked for */
const MEMORY_PLACES = 12; /* places of a slot that are listed */
const READ_STEPS = 5; /* page.css has a colour for each */

let memoryText = null;
let memoryMap = null;
let memoryBusy = false;
/* What is shown. slot: {m, slot} or null. all: whether the heads show all their slots. */
const memoryNow = { trace: null, tokens: [], p: -1, slot: null, all: false, counts: null };

/* ---- one token ------------------------------------------------------------------------------ */

function memorySlotButton(m, read, most) {
    const bar = make("span", { className: "bar" });
    bar.style.width = 100 * Math.min(1, Math.abs(read.weight) / most) + "%";
    const chosen = memoryNow.slot !== null && memoryNow.slot.m === m && memoryNow.slot.slot === read.slot;
    const button = make("button", { type: "button", className: "slot" + (chosen ? " chosen" : "") },
        make("span", { className: "n", textContent: read.slot }),
        make("span", { className: "track" }, bar),
        make("span", { className: "p", textContent: read.weight.toFixed(2) }));
    button.setAttribute("aria-label", "slot " + read.slot + " of memory " + m + ", weight " + read.weight.toFixed(3));
    button.dataset.slot = read.slot;
    button.dataset.memory = m;
    button.addEventListener("click", () => memorySlot(m, read.slot));
    return button;
}

function memoryHead(m, p, h) {
    const reads = memoryNow.trace.reads(m, p, h);
    const shown = memoryNow.all ? reads : reads.slice(0, MEMORY_SHOWN);
    const most = Math.max(...reads.map((read) => Math.abs(read.weight)), 1e-9);
    return make("div", { className: "head" }, make("h4", { textContent: "Head " + h }),
        ...shown.map((read) => memorySlotButton(m, read, most)));
}

function memoryToken(p) {
    memoryNow.p = p;
    const { trace, tokens } = memoryNow;
    const all = make("input", { type: "checkbox", checked: memoryNow.all });
    all.addEventListener("change", () => {
        memoryNow.all = all.checked;
        memoryToken(p);
        $("memory-token").querySelector("input").focus();
    });
    const parts = trace.memories().flatMap((m) => {
        const { heads, knn } = trace.memory.get(m);
        const each = Array.from({ length: heads }, (unused, h) => memoryHead(m, p, h));
        return [make("h3", { textContent: memoryName(m) },
            make("span", { className: "hint", textContent: " " + many(heads, "head") + " · " + many(knn, "slot")
                + " each of " + whole.format(memoriesServed()[m].slots) })),
            make("div", { className: "heads" }, ...each)];
    });
    $("memory-token").replaceChildren(
        make("h2", {}, "Read at ", make("q", { textContent: tokenQuoted(tokens[p]).slice(1, -1) })),
        make("p", { className: "hint", textContent: p + 1 < tokens.length
            ? "Slots and their weights. They help to predict what follows: " + tokenQuoted(tokens[p + 1]) + "."
            : "Slots and their weights. They help to predict what follows the text." }),
        ...parts,
        make("label", { className: "inline" }, all, "all slots of each head"));
}

/* ---- one slot ------------------------------------------------------------------------------- */

function memoryPlaceButton(place) {
    const { tokens } = memoryNow;
    const around = (from, to) => tokens.slice(Math.max(0, from), to).map((token) => token.text).join("").replace(/\s+/g, " ");
    const button = make("button", { type: "button", className: "place" },
        make("span", { className: "p", textContent: place.weight.toFixed(2) }),
        make("span", { className: "context" }, around(place.p - 4, place.p),
            make("mark", { textContent: tokens[place.p].text.trim() === "" ? "␣" : tokens[place.p].text }),
            around(place.p + 1, place.p + 5)),
        make("span", { className: "hint", textContent: "head " + place.h }));
    button.addEventListener("click", () => {
        memoryText.focus(place.p);
        memoryText.choose(place.p);
    });
    return button;
}

/* Where a slot lies in its table: of a product-key memory, which keys of the two halves lead to it. */
function memoryKeys(m, slot) {
    const memory = memoriesServed()[m];
    if (!memory || memory.kind !== "product") {
        return "";
    }
    const side = Math.round(Math.sqrt(memory.slots));
    return "Key " + Math.floor(slot / side) + " of the first half, " + slot % side + " of the second. ";
}

function memorySlot(m, slot) {
    memoryNow.slot = { m, slot };
    for (const button of document.querySelectorAll("#memory-token .slot")) {
        button.classList.toggle("chosen", Number(button.dataset.slot) === slot && Number(button.dataset.memory) === m);
    }
    $("map-memory").value = m;
    memoryMapShow();
    memoryMap.mark(slot);
    const places = memoryNow.trace === null ? [] : memoryNow.trace.places(m, slot);
    const byToken = new Map();
    for (const { p, weight } of places) {
        byToken.set(p, (byToken.get(p) || 0) + Math.abs(weight));
    }
    const most = Math.max(...byToken.values(), 1e-9);
    memoryText.mark("r", (p) => byToken.has(p)
        ? "r" + Math.max(1, Math.ceil(READ_STEPS * byToken.get(p) / most)) : "");
    const listed = [...places].sort((a, b) => b.weight - a.weight).slice(0, MEMORY_PLACES);
    const sum = places.reduce((total, place) => total + place.weight, 0);
    const off = make("button", { type: "button", className: "second" });
    off.addEventListener("click", () => compareSwitchSlot(m, slot));
    show($("memory-slot"), true);
    $("memory-slot").replaceChildren(
        make("h2", { textContent: "Slot " + slot + " of memory " + m }),
        make("p", { className: "hint", textContent: memoryKeys(m, slot) + (memoryNow.trace === null ? ""
            : "Read " + many(places.length, "time") + " in this text, at " + many(byToken.size, "token")
            + ", weight " + short(sum) + " in all. ")
            + (memoryNow.counts === null ? "" : "All traffic: " + many(memoryNow.counts.reads(m, slot), "time") + ".") }),
        make("div", { className: "places" }, ...listed.map(memoryPlaceButton)),
        places.length > listed.length ? make("p", { className: "hint", textContent: "The "
            + listed.length + " with the most weight are listed; all are marked in the text." }) : "",
        served.info === null ? "" : off);
    memorySlotIsOff();
}

/* The button of the slot that is shown says what it does. */
function memorySlotIsOff() {
    const button = $("memory-slot").querySelector(".second");
    if (button !== null) {
        const { m, slot } = memoryNow.slot;
        button.textContent = compareHasSlot(m, slot) ? "Switch this slot on" : "Switch this slot off";
    }
}

/* ---- the map -------------------------------------------------------------------------------- */

function memoryMapShow() {
    const m = Number($("map-memory").value);
    const { trace, counts } = memoryNow;
    if ($("map-of").value === "all") {
        if (counts === null) {
            return;
        }
        memoryMap.set(counts.nSlot(m), (visit) => counts.each(m, visit));
    } else if (trace !== null) {
        memoryMap.set(memoriesServed()[m].slots, (visit) => trace.each(m, visit));
    }
    let total = 0;
    let slots = 0;
    const seen = new Set();
    const source = $("map-of").value === "all" ? counts : trace;
    source.each(m, (slot, n) => {
        total += n;
        slots += source === counts || !seen.has(slot) ? 1 : 0;
        seen.add(source === counts ? 0 : slot);
    });
    show($("map-which"), $("map-memory").options.length > 1);
    const said = many(total, "read") + " of " + many(slots, "slot") + " among " + whole.format(memoryMap.nSlot);
    $("map").setAttribute("aria-label", "Map of the table: " + said + ". Arrow keys move, Enter chooses a slot.");
    $("map-state").textContent = said + (source === counts && counts.about.positions
        ? ", in " + many(counts.about.positions, "position") + " since the start." : ".")
        + (memoryMap.cells < memoryMap.side ? " Each cell is several slots." : "");
}

async function memoryMapOf() {
    if ($("map-of").value === "all") {
        const [counts, why] = await Counts.load(); /* anew each time: they grow */
        memoryNow.counts = counts;
        if (counts === null) {
            $("map-state").textContent = why;
            $("map-of").value = "text";
            if (served.info === null) {
                show($("memory-look"), false);
                $("memory-state").textContent = why;
            }
            return;
        }
    }
    memoryMapShow();
}

function memoryMapPoint(slot, reads, isCell) {
    $("map-state").textContent = (isCell ? "Around slot " : "Slot ") + slot + ": "
        + (reads > 0 ? "read " + many(reads, "time") : "not read") + ".";
}

/* ---- the text ------------------------------------------------------------------------------- */

function memoryFill(input, result) {
    const trace = new Trace(result.memory.slots);
    const tokens = tokensOfText(input, result.tokens);
    /* The positions count what the server put in front of the text: the beginning-of-text token. */
    while (tokens.length < trace.nPosition) {
        tokens.unshift({ id: served.info.model.bos_token_id, text: "⟨start⟩", bits: null, p: null, rank: null,
            entropy: null, top: [], isUnknown: false, isGiven: false });
    }
    Object.assign(memoryNow, { trace, tokens, slot: null });
    memoryText.set(tokens);
    $("map-memory").replaceChildren(...trace.memories().map((m) => make("option", { value: m, textContent: memoryName(m) })));
    $("map-of").value = "text";
    $("memory-state").textContent = many(result.n_tokens, "token") + " · "
        + many(result.memory.layers.reduce((sum, layer) => sum + layer.lookups, 0), "look-up")
        + " · all of this text, no sample" + (tokens.length > TOKENS_SHOWN_MAX
            ? ", but only its first " + whole.format(TOKENS_SHOWN_MAX) + " tokens are shown" : "");
    show($("memory-slot"), false);
    memoryMap.mark(-1);
    show($("memory-look"), true);
    memoryMapShow();
    const [m] = trace.memories();
    const { p, slot } = trace.liveliest(m);
    memoryText.choose(p);
    memorySlot(m, slot);
}

async function memoryRun() {
    const input = inputIn("memory-input");
    memoryBusy = true;
    $("memory-go").disabled = true;
    troubleHide();
    $("memory-state").textContent = "Reading.";
    try {
        const answer = await askJson("score", scoreBody(input, { memory: "slots" }));
        memoryFill(input, answer.results[0]);
    } catch (error) {
        $("memory-state").textContent = "";
        throw error;
    } finally {
        memoryBusy = false;
        $("memory-go").disabled = false;
    }
}

/* The overlays that the server has, as a table; they are put there and taken away by PUT and DELETE. */
async function memoryOverlays() {
    let list = [];
    try {
        list = (await askJson("memory/overlays")).data;
    } catch (error) {
        if (error.status !== 404 && error.status !== 400) {
            throw error;
        }
    }
    const rows = list.map((overlay) => make("tr", {}, make("th", { scope: "row", textContent: overlay.name }),
        make("td", { textContent: overlay.version }), make("td", { textContent: overlay.mode }),
        make("td", { textContent: overlay.memories.map((each) =>
            many(each.rows, "row") + " of memory " + each.memory).join(", ") }),
        make("td", { textContent: whole.format(overlay.bytes) }), make("td", { textContent: overlay.sha256.slice(0, 12) })));
    const head = ["Name", "Version", "Mode", "Rows", "Bytes", "SHA-256"];
    $("memory-overlays").replaceChildren(make("h2", { textContent: "Overlays" }), list.length === 0
        ? make("p", { className: "hint", textContent: "This server has none. PUT /memory/overlays/NAME brings one here." })
        : wideTable("Overlays", head, rows));
    show($("memory-overlays"), true);
}

/* At the admin port there is no text, but the map of all traffic, and the overlays. */
async function memoryAtAdmin() {
    show($("memory-form"), false);
    await memoryOverlays();
    const [counts, why] = await Counts.load();
    if (counts === null) {
        $("memory-state").textContent = why;
        return;
    }
    memoryNow.counts = counts;
    $("map-memory").replaceChildren(...counts.memories().map((m) => make("option", { value: m, textContent: memoryName(m) })));
    $("map-of").value = "all";
    $("map-of").options[0].disabled = true;
    $("memory-state").textContent = "What all traffic read since the start. Texts are traced at the main port.";
    show($("memory-token"), false);
    show($("memory-look"), true);
    memoryMapShow();
}

function memoryListen() {
    memoryText = new TokenText($("memory-text"), { onChoose: memoryToken, hasHeat: false });
    memoryMap = new TableMap($("map"), { onPoint: memoryMapPoint,
        onChoose: (slot) => memorySlot(Number($("map-memory").value), slot) });
    $("map-memory").addEventListener("change", () => {
        memoryMap.mark(-1);
        memoryMapShow();
    });
    $("map-of").addEventListener("change", () => memoryMapOf().catch(troubleShow));
    $("memory-form").addEventListener("submit", (event) => {
        event.preventDefault();
        if (!memoryBusy) {
            memoryRun().catch(troubleShow);
        }
    });
}

function memoryStart() {
    if (memoryText === null) {
        memoryListen();
    }
    if (served.info === null) {
        memoryAtAdmin().catch(troubleShow);
        return;
    }
    const n = memoriesServed().length;
    const traces = served.info.defaults.memory_trace;
    const why = n === 0 ? "This model has no product-key memories: there are no slots to see."
        : traces === "on" ? "" : "This server tells no slots (--memory-trace " + traces + ").";
    $("memory-go").disabled = why !== "";
    $("memory-state").textContent = why;
    show($("compare"), n > 0);
    if (n > 0) {
        compareStart().catch(troubleShow);
    }
}
