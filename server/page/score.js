/* Part 5, the view Score: how well the model knows a text, as figures and as a map of surprise. */

let scoreText = null;
let scoreBusy = false;

function scoreBody(input, fields) {
    return JSON.stringify({ [typeof input === "string" ? "text" : "tokens"]: input,
        logprobs: alternativesMax(), ranks: true, entropy: true, ...fields });
}

function scoreFigure(name, value, title) {
    return make("div", { title }, make("dt", { textContent: name }), make("dd", { textContent: value }));
}

function scoreShow(text, result) {
    const tokens = tokensOfText(text, result.tokens);
    $("score-figures").replaceChildren(
        scoreFigure("Perplexity", short(result.perplexity), "exp of the mean negative log-probability of a token"),
        scoreFigure("Bits per byte", short(result.bits_per_byte), "surprise of the whole text over its UTF-8 bytes"),
        scoreFigure("Bits per token", short(result.bits_per_token), "mean surprise of a token"),
        scoreFigure("Tokens", whole.format(result.n_tokens), whole.format(result.n_scored) + " of them scored"),
        scoreFigure("Accuracy", percent(result.accuracy), "tokens that the model found the likeliest"),
        scoreFigure("Unknown", whole.format(result.n_unk), "tokens that stand for text which the vocabulary lacks"));
    show($("score-figures"), true);
    scoreText.set(tokens);
    $("score-strip").replaceChildren(surpriseStrip(tokens, (i) => scoreText.focus(Math.min(i, scoreText.spans.length - 1))));
    show($("score-strip"), tokens.length > 1);
    const parts = [];
    if (result.windows.count > 1) {
        parts.push(many(result.windows.count, "window") + " of " + whole.format(result.windows.max_context)
            + " positions, " + whole.format(result.windows.stride) + " new in each");
    }
    if (result.n_unk > 0) {
        parts.push("unknown tokens have a wavy line");
    }
    if (tokens.length > TOKENS_SHOWN_MAX) {
        parts.push("the first " + whole.format(TOKENS_SHOWN_MAX) + " tokens are shown, the figures are of all");
    }
    $("score-state").replaceChildren(parts.join(" · "), heatLegend());
}

async function scoreRun() {
    const input = inputIn("score-input");
    scoreBusy = true;
    $("score-go").disabled = true;
    troubleHide();
    $("score-state").textContent = "Scoring.";
    try {
        const answer = await askJson("score", scoreBody(input, { stride: numberIn("score-stride") }));
        scoreShow(input, answer.results[0]);
    } catch (error) {
        $("score-state").textContent = "";
        throw error;
    } finally {
        scoreBusy = false;
        $("score-go").disabled = false;
    }
}

function scoreStart() {
    const context = served.info.model.context;
    $("score-stride").disabled = context === null;
    $("score-stride").max = served.info.defaults.max_context || "";
    if (scoreText !== null) {
        return;
    }
    scoreText = new TokenText($("score-text"));
    $("score-form").addEventListener("submit", (event) => {
        event.preventDefault();
        if (!scoreBusy) {
            scoreRun().catch(troubleShow);
        }
    });
}
