/* Part 8, the lower half of the view Memory: switch off memories, heads and slots, or take an overlay, and
 * read the two texts side by side. */

const COMPARE_SLOTS_MAX = 4096; /* of one request, by the server's rule */

let compareLeft = null;
let compareRight = null;
let compareStop = null;
const compareOff = new Map(); /* "m:slot": [m, slot] */

function compareHasSlot(m, slot) {
    return compareOff.has(m + ":" + slot);
}

function compareSwitchSlot(m, slot) {
    const name = m + ":" + slot;
    if (!compareOff.delete(name) && compareOff.size < COMPARE_SLOTS_MAX) {
        compareOff.set(name, [m, slot]);
    }
    compareChips();
}

/* The slots that are off, each a button that switches it on again. */
function compareChips() {
    for (const list of document.querySelectorAll("#compare-switches .chips")) {
        const m = Number(list.dataset.memory);
        list.replaceChildren(...[...compareOff.values()].filter((each) => each[0] === m).map(([, slot]) => {
            const chip = make("button", { type: "button", className: "chip", textContent: "slot " + slot + " is off ✕" });
            chip.setAttribute("aria-label", "switch slot " + slot + " of memory " + m + " on again");
            chip.addEventListener("click", () => compareSwitchSlot(m, slot));
            return chip;
        }));
    }
    memorySlotIsOff();
}

function compareSwitch(label, dataset) {
    const box = make("input", { type: "checkbox", checked: true });
    Object.assign(box.dataset, dataset);
    return make("label", { className: "switch" }, box, label);
}

function compareSwitches() {
    $("compare-switches").replaceChildren(...memoriesServed().map((memory, m) => {
        const chips = make("span", { className: "chips" });
        chips.dataset.memory = m;
        const heads = make("span", { className: "of-heads" },
            ...Array.from({ length: memory.heads }, (unused, h) => compareSwitch("head " + h, { memory: m, head: h })));
        const all = compareSwitch(memoryName(m), { memory: m });
        all.firstChild.addEventListener("change", () => heads.classList.toggle("off", !all.firstChild.checked));
        return make("div", { className: "row" }, all, heads, chips);
    }));
    compareChips();
}

/* The switches as the field "ablate". */
function compareAblate() {
    const off = [...document.querySelectorAll("#compare-switches input:not(:checked)")];
    const memories = new Set(off.filter((box) => box.dataset.head === undefined).map((box) => Number(box.dataset.memory)));
    const list = [...memories].map((memory) => ({ memory }));
    for (const box of off) {
        if (box.dataset.head !== undefined && !memories.has(Number(box.dataset.memory))) {
            list.push({ memory: Number(box.dataset.memory), head: Number(box.dataset.head) });
        }
    }
    for (const m of memoriesServed().keys()) {
        const slots = [...compareOff.values()].filter((each) => each[0] === m).map((each) => each[1]);
        if (slots.length > 0 && !memories.has(m)) {
            list.push({ memory: m, slots });
        }
    }
    return list;
}

/* Overlays are in the list of models as MODEL:NAME, so that a key sees its own. */
async function compareOverlays() {
    const list = await askJson("v1/models");
    const base = served.info.model_id + ":";
    const names = list.data.map((model) => model.id).filter((id) => id.startsWith(base)).map((id) => id.slice(base.length));
    const select = $("compare-overlay");
    const before = select.value;
    select.replaceChildren(make("option", { value: "", textContent: "none" }),
        ...names.map((name) => make("option", { value: name, textContent: name })));
    select.value = names.includes(before) ? before : "";
    select.disabled = names.length === 0;
    $("compare-overlay-note").textContent = names.length > 0 ? ""
        : "This server has no overlays. They are put there at the admin port, by PUT /memory/overlays/NAME.";
}

/* ---- two texts ------------------------------------------------------------------------------ */

const COMPARE_CELLS_MAX = 2 ** 24; /* of the table below: texts of 4,096 tokens that share no beginning */

/* Which tokens of a and b are not in their longest common subsequence: two lists of true and false. What is
 * too long for that differs from the first difference on. */
function tokensDiffer(a, b) {
    const same = a.findIndex((token, i) => !b[i] || b[i].id !== token.id);
    const begin = same < 0 ? a.length : same;
    const [inA, inB] = [a.map((token, i) => i >= begin), b.map((token, i) => i >= begin)];
    const [n, m] = [a.length - begin, b.length - begin];
    if (n * m > COMPARE_CELLS_MAX) {
        return [inA, inB];
    }
    const isSame = (i, j) => a[begin + i].id === b[begin + j].id;
    const best = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
    for (let i = n - 1; i >= 0; i--) {
        for (let j = m - 1; j >= 0; j--) {
            best[i][j] = isSame(i, j) ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
        }
    }
    for (let i = 0, j = 0; i < n && j < m;) {
        if (isSame(i, j)) {
            inA[begin + i++] = inB[begin + j++] = false;
        } else if (best[i + 1][j] >= best[i][j + 1]) {
            i++;
        } else {
            j++;
        }
    }
    return [inA, inB];
}

/* Gives the overlays that the answer was computed with, in words. */
async function compareWrite(text, body, signal) {
    text.clear();
    const read = bytesReader();
    let overlays = [];
    for await (const event of askEvents("generate", body, signal)) {
        if (event.token) {
            text.add(tokenOf(event.token, read(event.token)));
        }
        overlays = event.overlay || overlays;
    }
    return overlays.map((overlay) => "Overlay " + overlay.name + ", version " + overlay.version + ". ").join("");
}

async function comparePerplexity(input, change, signal) {
    const fields = { [typeof input === "string" ? "text" : "tokens"]: input, ...change };
    const answer = await askJson("score", JSON.stringify(fields), signal);
    return answer.results[0].perplexity;
}

function compareMark() {
    const [left, right] = tokensDiffer(compareLeft.tokens, compareRight.tokens);
    compareLeft.mark("differs", (i) => (left[i] ? "differs" : ""));
    compareRight.mark("differs", (i) => (right[i] ? "differs" : ""));
    const first = compareRight.tokens.findIndex((token, i) => !compareLeft.tokens[i] || compareLeft.tokens[i].id !== token.id);
    const isSame = first < 0 && compareLeft.tokens.length === compareRight.tokens.length;
    return isSame ? "Both texts are the same." : "They part at token "
        + ((first < 0 ? compareRight.tokens.length : first) + 1) + ".";
}

async function compareRun() {
    const input = inputIn("memory-input");
    const ablate = compareAblate();
    const overlay = $("compare-overlay").value;
    const change = { ...(ablate.length > 0 ? { ablate } : {}), ...(overlay !== "" ? { overlay } : {}) };
    const body = { prompt: input, stream: true, logprobs: alternativesMax(), max_tokens: numberIn("compare-max"),
        temperature: numberIn("compare-temperature") };
    const seed = seedIn("compare-seed") || "1"; /* without one the two would have different ones */
    compareStop = new AbortController();
    const { signal } = compareStop;
    $("compare-go").textContent = "Stop";
    troubleHide();
    show($("compare-sides"), true);
    $("compare-state").textContent = "Writing.";
    $("compare-left-state").textContent = $("compare-right-state").textContent = "";
    compareRight.clear();
    try {
        /* One after the other: a server may allow a client one request at a time. */
        await compareWrite(compareLeft, withSeed(body, seed), signal);
        const overlays = await compareWrite(compareRight, withSeed({ ...body, ...change }, seed), signal);
        $("compare-state").textContent = compareMark() + (Object.keys(change).length === 0
            ? " Nothing is switched off, and no overlay is chosen." : "");
        const before = await comparePerplexity(input, {}, signal);
        const after = await comparePerplexity(input, change, signal);
        $("compare-left-state").textContent = "Perplexity of the text above: " + short(before);
        $("compare-right-state").textContent = overlays + "Perplexity of the text above: " + short(after);
    } catch (error) {
        $("compare-state").textContent = error.name === "AbortError" ? "Stopped." : "";
        throw error;
    } finally {
        compareStop = null;
        $("compare-go").textContent = "Write both";
    }
}

async function compareStart() {
    if (compareLeft === null) {
        compareLeft = new TokenText($("compare-left"), { hasHeat: false });
        compareRight = new TokenText($("compare-right"), { hasHeat: false });
        $("compare").addEventListener("submit", (event) => {
            event.preventDefault();
            if (compareStop !== null) {
                compareStop.abort();
            } else {
                compareRun().catch(troubleShow);
            }
        });
        $("compare-reset").addEventListener("click", () => {
            compareOff.clear();
            compareSwitches();
            $("compare-overlay").value = "";
        });
        compareSwitches();
    }
    await compareOverlays();
}
