/* Part 2: a text shown token by token, coloured by surprise, walked with the arrow keys; and the card
 * that tells about the token under the pointer or the focus.
 *
 * A token here: {id, text, bits, p, rank, entropy, top: [{text, p}], isUnknown, isGiven}. bits is its
 * surprise, -log2 of its probability p; null where nothing predicts it. isGiven: not the model's. */

const TOKENS_SHOWN_MAX = 20000;
const HEAT_STEPS = 8; /* page.css has a colour for each */
const HEAT_BITS = 1.5; /* of a step: 12 bits and more are the last, about a guess among 4,096 */

function heatOf(bits) {
    return bits === null ? 0 : Math.max(0, Math.min(HEAT_STEPS, Math.floor(bits / HEAT_BITS)));
}

/* What a server's token says; text: the characters that it stands for. */
function tokenOf(native, text) {
    const isImpossible = native.impossible === true;
    const has = typeof native.logprob === "number";
    const unknown = served.info.model.unk_token_id;
    return {
        id: native.id,
        text,
        bits: isImpossible ? Infinity : has ? -native.logprob / Math.LN2 : null,
        p: isImpossible ? 0 : has ? Math.exp(native.logprob) : null,
        rank: native.rank ?? null,
        entropy: typeof native.entropy === "number" ? native.entropy / Math.LN2 : null,
        top: (native.top || []).map((each) => ({
            id: each.id,
            text: pieceText(each.piece, each.id),
            p: each.logprob === null ? 0 : Math.exp(each.logprob),
        })),
        isUnknown: unknown !== null && native.id === unknown,
        isGiven: false,
    };
}

/* A piece of the vocabulary as people read it: SentencePiece writes a space as ▁. */
function pieceText(piece, id) {
    return piece === null || piece === undefined ? "⟨" + id + "⟩" : piece.replaceAll("▁", " ");
}

/* The tokens of a text as /score tells them: each stands for the characters up to the next one's offset.
 * Of several tokens within a character the last one has it. */
function tokensOfText(text, natives) {
    const chars = typeof text === "string" ? Array.from(text) : null;
    return natives.map((native, i) => {
        const begin = native.offset;
        const next = i + 1 < natives.length ? natives[i + 1].offset : chars ? chars.length : null;
        const known = chars !== null && typeof begin === "number" && typeof next === "number";
        /* What the tokenizer leaves out in front of the text belongs to its first token. */
        return tokenOf(native, known ? chars.slice(i === 0 ? 0 : begin, next).join("")
            : pieceText(native.piece, native.id));
    });
}

/* The space in front of a word, which stays without colour, and the rest: what has no ink gets a sign, so
 * that it can be seen and chosen. */
function tokenInk(text) {
    const lead = /^ +(?=\S)/.exec(text);
    const space = lead ? lead[0] : "";
    const rest = text.slice(space.length);
    return [space, rest === "" ? "·" : rest.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t")];
}

function tokenQuoted(token) {
    const text = token.text.trim() === "" ? token.text.replaceAll(" ", "␣") : token.text.replace(/^ +/, "");
    return "“" + (text === "" ? "part of a character" : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥")) + "”";
}

/* ---- the card ------------------------------------------------------------------------------- */

function cardRow(name, value) {
    return make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }));
}

function cardAlternative(each, chosen, most) {
    const bar = make("span", { className: "bar" });
    bar.style.width = Math.max(1, 100 * each.p / most) + "%";
    return make("li", { className: each.id === chosen ? "chosen" : "" },
        make("span", { className: "piece", textContent: each.text.replace(/\n/g, "⏎") }),
        make("span", { className: "track" }, bar),
        make("span", { className: "p", textContent: percent(each.p) }));
}

function cardFill(card, token) {
    const facts = make("dl", {});
    if (token.isGiven) {
        facts.append(cardRow("Given", "by the prompt"));
    } else if (token.p === null) {
        facts.append(cardRow("First", "nothing predicts it"));
    } else {
        facts.append(cardRow("Probability", percent(token.p)),
            cardRow("Surprise", token.bits === Infinity ? "impossible" : short(token.bits) + " bits"));
        if (token.rank !== null) {
            facts.append(cardRow("Rank", whole.format(token.rank) + " of " + whole.format(served.info.model.n_vocab)));
        }
        if (token.entropy !== null) {
            facts.append(cardRow("Entropy here", short(token.entropy) + " bits"));
        }
    }
    const most = token.top.length > 0 ? Math.max(...token.top.map((each) => each.p), 1e-9) : 1;
    card.replaceChildren(
        make("p", { className: "token", textContent: tokenQuoted(token) },
            token.id === null ? null : make("span", { className: "id", textContent: "id " + token.id })),
        token.isUnknown ? make("p", { className: "unknown", textContent: "The vocabulary lacks this text." }) : "",
        facts,
        token.top.length > 0 ? make("ol", {}, ...token.top.map((each) => cardAlternative(each, token.id, most))) : "");
}

/* Below the element, or above where there is no room; never outside of the window. */
function cardPlace(card, element) {
    const at = element.getClientRects()[0] || element.getBoundingClientRect();
    const box = card.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - box.width - 8));
    const below = at.bottom + 8;
    const top = below + box.height <= window.innerHeight || at.top < box.height + 16 ? below
        : at.top - box.height - 8;
    card.style.left = left + window.scrollX + "px";
    card.style.top = top + window.scrollY + "px";
}

function cardShow(element, token) {
    const card = $("card");
    cardFill(card, token);
    show(card, true);
    cardPlace(card, element);
    element.setAttribute("aria-describedby", "card");
}

function cardHide() {
    show($("card"), false);
}

/* ---- the text ------------------------------------------------------------------------------- */

class TokenText {
    /* onChoose(i): a token was clicked, or Enter was pressed on it. hasHeat: colour by surprise. */
    constructor(element, { onChoose = null, hasHeat = true } = {}) {
        this.element = element;
        this.onChoose = onChoose;
        this.hasHeat = hasHeat;
        element.setAttribute("role", "listbox");
        element.addEventListener("pointerover", (event) => this.hover(event));
        element.addEventListener("pointerleave", cardHide);
        element.addEventListener("click", (event) => this.click(event));
        element.addEventListener("keydown", (event) => this.key(event));
        element.addEventListener("focusin", (event) => this.hover(event));
        element.addEventListener("focusout", cardHide);
        this.clear();
    }

    clear() {
        this.tokens = [];
        this.spans = [];
        this.at = -1; /* the token that Tab comes to */
        this.chosen = -1;
        this.element.replaceChildren();
        show(this.element, false);
        cardHide();
    }

    set(tokens) {
        this.clear();
        this.add(...tokens.slice(0, TOKENS_SHOWN_MAX));
    }

    add(...tokens) {
        const fragment = document.createDocumentFragment();
        for (const token of tokens) {
            const span = document.createElement("span");
            const [space, ink] = tokenInk(token.text);
            span.textContent = ink;
            span.setAttribute("role", "option");
            span.tabIndex = this.spans.length === 0 ? 0 : -1;
            span.className = "t" + (this.hasHeat && !token.isGiven ? " h" + heatOf(token.bits) : "")
                + (token.isGiven ? " given" : "") + (token.isUnknown ? " unknown" : "")
                + (token.text.trim() === "" ? " blank" : "");
            if (token.text.trim() === "") { /* a screen reader needs a name */
                span.ariaLabel = token.text === "" ? "part of a character" : "white space";
            }
            this.tokens.push(token);
            this.spans.push(span);
            fragment.append(space, span);
        }
        this.at = Math.max(this.at, 0);
        this.element.append(fragment);
        show(this.element, this.tokens.length > 0);
    }

    indexOf(event) {
        const span = event.target.closest(".t");
        return span ? this.spans.indexOf(span) : -1;
    }

    hover(event) {
        const i = this.indexOf(event);
        if (i >= 0) {
            cardShow(this.spans[i], this.tokens[i]);
        }
    }

    click(event) {
        const i = this.indexOf(event);
        if (i >= 0) {
            this.focus(i);
            this.choose(i);
        }
    }

    /* Of a long text not all tokens are shown: the others can be chosen, but have no place to see. */
    focus(i) {
        if (i >= this.spans.length) {
            return;
        }
        this.spans[this.at].tabIndex = -1;
        this.at = i;
        this.spans[i].tabIndex = 0;
        this.spans[i].focus({ preventScroll: false });
    }

    choose(i) {
        if (this.onChoose === null) {
            return;
        }
        this.spans[this.chosen]?.classList.remove("chosen");
        this.spans[this.chosen]?.removeAttribute("aria-selected");
        this.chosen = i;
        this.spans[i]?.classList.add("chosen");
        this.spans[i]?.setAttribute("aria-selected", "true");
        this.onChoose(i);
    }

    /* The token of the line above or below that is nearest. */
    inLine(step) {
        const here = this.spans[this.at].getBoundingClientRect();
        let best = this.at;
        let nearest = Infinity;
        for (let i = this.at + step; i >= 0 && i < this.spans.length; i += step) {
            const box = this.spans[i].getBoundingClientRect();
            const lines = step * (box.top - here.top) / here.height;
            const aside = Math.abs(box.left - here.left);
            if (lines > 0.5 && lines < 2.5 && aside < nearest) {
                nearest = aside;
                best = i;
            } else if (lines >= 2.5) {
                break;
            }
        }
        return best;
    }

    key(event) {
        const last = this.spans.length - 1;
        if (this.at < 0 || event.ctrlKey || event.metaKey || event.altKey) {
            return;
        }
        const to = { ArrowRight: Math.min(last, this.at + 1), ArrowLeft: Math.max(0, this.at - 1),
            Home: 0, End: last }[event.key];
        if (to !== undefined) {
            this.focus(to);
        } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
            this.focus(this.inLine(event.key === "ArrowDown" ? 1 : -1));
        } else if (event.key === "Enter" || event.key === " ") {
            this.choose(this.at);
        } else if (event.key === "Escape") {
            cardHide();
            return;
        } else {
            return;
        }
        event.preventDefault();
    }

    /* Marks each token with the class that of(i) names, "" for none, of those that begin with prefix. */
    mark(prefix, of) {
        this.spans.forEach((span, i) => {
            const kept = span.className.split(" ").filter((name) => !name.startsWith(prefix));
            const name = of(i);
            span.className = (name === "" ? kept : [...kept, name]).join(" ");
        });
    }
}

/* The scale of the colours. */
function heatLegend() {
    const scale = make("span", { className: "scale", ariaHidden: "true" });
    for (let i = 0; i <= HEAT_STEPS; i++) {
        scale.append(make("i", { className: "h" + i }));
    }
    return make("span", { className: "legend" }, "expected", scale, "surprising: "
        + HEAT_STEPS * HEAT_BITS + " bits and more");
}
