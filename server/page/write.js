/* Part 4, the view Write: a prompt, how to draw, and the text as it comes, coloured by surprise. */

let writeText = null;
let writeStop = null; /* AbortController of the stream that runs */
let writePrompt = ""; /* of the text that is shown */
let writeMade = "";   /* what the model added */

/* The text of each generated token, from its bytes: a character may need several tokens. */
function bytesReader() {
    const decoder = new TextDecoder();
    return (token) => Array.isArray(token.bytes)
        ? decoder.decode(new Uint8Array(token.bytes), { stream: true }) : pieceText(token.piece, token.id);
}

function writeBody() {
    const stop = $("write-stop-at").value;
    return withSeed({
        prompt: inputIn("write-prompt"), stream: true, logprobs: alternativesMax(),
        max_tokens: numberIn("write-max"), temperature: numberIn("write-temperature"),
        top_p: numberIn("write-top-p"), top_k: numberIn("write-top-k"), min_p: numberIn("write-min-p"),
        repetition_penalty: numberIn("write-repetition"), stop: stop === "" ? undefined : stop,
    }, seedIn("write-seed"));
}

/* Alternatives to ask for: five, or what the server allows. */
function alternativesMax() {
    return Math.min(5, served.info.limits.max_logprobs);
}

function writeBusy(isBusy) {
    $("write-go").disabled = isBusy;
    $("write-stop").disabled = !isBusy;
    $("write-text").classList.toggle("busy", isBusy);
}

/* perplexity of the tokens: the exponential of their mean surprise. */
function perplexityOf(tokens) {
    const scored = tokens.filter((token) => token.bits !== null && !token.isGiven);
    return scored.length === 0 ? null
        : 2 ** (scored.reduce((sum, token) => sum + token.bits, 0) / scored.length);
}

const WRITE_ENDS = { stop: "the text ended", length: "as long as asked for" };

function writeFigures(last, wasStopped) {
    const made = writeText.tokens.filter((token) => !token.isGiven);
    const parts = [many(made.length, "token")];
    if (last !== null && last.timings) {
        parts.push(short(last.timings.predicted_per_second) + " tokens/s",
            "first token after " + seconds(last.timings.prefill_ms / 1000));
    }
    if (made.length > 0) {
        parts.push("perplexity " + short(perplexityOf(made)));
    }
    if (last !== null) {
        parts.push(WRITE_ENDS[last.finish_reason] || last.finish_reason, "seed " + last.seed);
    }
    if (wasStopped) {
        parts.push("stopped");
    }
    $("write-state").replaceChildren(parts.join(" · "), made.length > 0 ? heatLegend() : "");
}

async function writeRun() {
    const body = writeBody();
    writeStop = new AbortController();
    writeBusy(true);
    troubleHide();
    writePrompt = $("write-prompt").value;
    writeMade = "";
    writeText.set(writePrompt === "" ? [] : [{ id: null, text: writePrompt, bits: null, p: null, top: [], isGiven: true }]);
    $("write-state").textContent = "Writing.";
    show($("write-after"), false);
    const read = bytesReader();
    let last = null;
    try {
        for await (const event of askEvents("generate", body, writeStop.signal)) {
            if (event.token) {
                writeText.add(tokenOf(event.token, read(event.token)));
            }
            writeMade += event.text || "";
            last = event.finish_reason ? event : last;
        }
        writeFigures(last, false);
    } catch (error) {
        writeFigures(null, error.name === "AbortError");
        throw error;
    } finally {
        writeStop = null;
        writeBusy(false);
        show($("write-after"), writeMade !== "");
    }
}

function writeStart() {
    const defaults = served.info.defaults;
    $("write-temperature").placeholder = short(defaults.temperature);
    $("write-top-p").placeholder = short(defaults.top_p);
    $("write-top-k").placeholder = defaults.top_k === 0 ? "all" : String(defaults.top_k);
    $("write-min-p").placeholder = short(defaults.min_p);
    $("write-repetition").placeholder = short(defaults.repetition_penalty);
    if (writeText !== null) {
        return;
    }
    writeText = new TokenText($("write-text"));
    $("write-form").addEventListener("submit", (event) => {
        event.preventDefault();
        if (writeStop === null) {
            writeRun().catch(troubleShow);
        }
    });
    $("write-stop").addEventListener("click", () => writeStop && writeStop.abort());
    $("view-write").addEventListener("keydown", (event) => {
        if (event.key === "Escape" && writeStop !== null) {
            writeStop.abort();
        }
    });
    const whole = () => writePrompt + writeMade;
    $("write-to-score").addEventListener("click", () => viewWith("score", "score-input", whole()));
    $("write-to-memory").addEventListener("click", () => viewWith("memory", "memory-input", whole()));
    $("write-on").addEventListener("click", () => {
        $("write-prompt").value = whole();
        writeRun().catch(troubleShow);
    });
}
