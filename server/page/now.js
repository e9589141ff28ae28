/* Part 9, the view Now: what the server does at this moment, from /metrics, which it asks for every two
 * seconds while the view is open. All it draws it has seen itself: it begins when the page does. */

const NOW_MS = 2000;
const NOW_PLACES = 151; /* five minutes, the longest axis */
const NOW_FIRST = 31;   /* one minute, the first */
const NOW_WINDOW = 15;  /* samples that percentiles are of: half a minute */

let nowTimer = null;
let nowPlots = null;
/* {at, value: Map of "name{labels}" to a number, drawn: for each plot its values, memories}, oldest first */
const nowSamples = [];

/* ---- reading -------------------------------------------------------------------------------- */

/* The text form of Prometheus: a line for each sample. */
function metricsOf(text) {
    const value = new Map();
    for (const line of text.split("\n")) {
        const end = line.lastIndexOf(" ");
        if (end > 0 && line[0] !== "#") {
            value.set(line.slice(0, end), Number(line.slice(end + 1)));
        }
    }
    return value;
}

function metric(sample, name) {
    return sample.value.get("pkmserve_" + name) ?? null;
}

/* The labels of all samples of a metric: [{labels: {layer: "6"}, value}]. */
function metricAll(sample, name) {
    const found = [];
    for (const [key, value] of sample.value) {
        if (key.startsWith("pkmserve_" + name + "{")) {
            const labels = {};
            for (const [, label, text] of key.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
                labels[label] = text.replace(/\\(["\\])/g, "$1");
            }
            found.push({ labels, value });
        }
    }
    return found;
}

/* Growth of a counter per second between two samples; null where the server began anew. */
function rate(from, to, name) {
    const grown = metric(to, name) - metric(from, name);
    return grown < 0 || to.at === from.at ? null : 1000 * grown / (to.at - from.at);
}

/* The mean of a histogram's values between two samples. */
function meanOf(from, to, name) {
    const n = metric(to, name + "_count") - metric(from, name + "_count");
    return n > 0 ? (metric(to, name + "_sum") - metric(from, name + "_sum")) / n : null;
}

/* Percentiles of a histogram's values between two samples: within a bucket they are drawn as even. */
function percentilesOf(from, to, name, shares) {
    const buckets = metricAll(to, name + "_bucket").map(({ labels, value }) => ({
        top: labels.le === "+Inf" ? Infinity : Number(labels.le),
        n: value - (from.value.get("pkmserve_" + name + '_bucket{le="' + labels.le + '"}') ?? 0),
    })).sort((a, b) => a.top - b.top);
    const total = buckets.length > 0 ? buckets[buckets.length - 1].n : 0;
    return shares.map((share) => {
        if (!(total > 0)) {
            return null;
        }
        const rank = share * total;
        const at = buckets.findIndex((bucket) => bucket.n >= rank);
        const [low, before] = at > 0 ? [buckets[at - 1].top, buckets[at - 1].n] : [0, 0];
        return buckets[at].top === Infinity ? low
            : low + (buckets[at].top - low) * (rank - before) / Math.max(1, buckets[at].n - before);
    });
}

/* ---- plots ---------------------------------------------------------------------------------- */

const PERCENTS = ["p50", "p90", "p99"];

/* of(from, to, old): the value of each series at sample `to`; from is the one before, old the one half a
 * minute before. */
function nowMakePlots() {
    const latency = (title, name) => ({
        plot: new TimePlot({ title, series: PERCENTS, format: seconds, note: "of the half minute before, from buckets" }),
        of: (from, to, old) => percentilesOf(old, to, name, [0.5, 0.9, 0.99]),
    });
    const per = (x) => short(x) + "/s";
    return [
        { plot: new TimePlot({ title: "Tokens", series: ["generated", "read"], format: per }),
            of: (from, to) => [rate(from, to, "generation_tokens_total"), rate(from, to, "prompt_tokens_total")] },
        { plot: new TimePlot({ title: "Requests", series: ["running", "waiting"], format: short }),
            of: (from, to) => [metric(to, "num_requests_running"), metric(to, "num_requests_waiting")] },
        { plot: new TimePlot({ title: "Batch", series: ["requests", "tokens"], format: short, note: "in a step, on average" }),
            of: (from, to) => [meanOf(from, to, "step_requests"), meanOf(from, to, "step_tokens")] },
        { plot: new TimePlot({ title: "KV cache", series: ["in use"], format: percent, top: 1 }),
            of: (from, to) => [metric(to, "kv_cache_usage_perc")] },
        { plot: new TimePlot({ title: "Prompt tokens from the cache", series: ["share"], format: percent, top: 1,
            note: "of those that the prefix cache was asked for" }),
            of: (from, to) => {
                const asked = rate(from, to, "prefix_cache_queries_total");
                return [asked > 0 ? rate(from, to, "prefix_cache_hits_total") / asked : null];
            } },
        { plot: new TimePlot({ title: "Refused", series: ["requests"], format: per, note: "for whatever reason" }),
            of: (from, to) => [metricAll(to, "requests_rejected_total").reduce((sum, { labels }) =>
                sum + rate(from, to, 'requests_rejected_total{reason="' + labels.reason + '"}'), 0)] },
        latency("Time to first token", "time_to_first_token_seconds"),
        latency("Inter-token latency", "inter_token_latency_seconds"),
        latency("End-to-end latency", "e2e_request_latency_seconds"),
    ];
}

/* What a new sample adds to the plots: computed once, when it comes. */
function nowAdd(sample) {
    const last = nowSamples[nowSamples.length - 1];
    const old = nowSamples[Math.max(0, nowSamples.length - NOW_WINDOW)];
    sample.drawn = nowPlots.map(({ plot, of }) => (last ? of(last, sample, old) : plot.series.map(() => null)));
    sample.memories = nowMemories(sample);
    nowSamples.push(sample);
    nowSamples.splice(0, nowSamples.length - NOW_PLACES);
}

function nowDraw() {
    nowPlots.forEach(({ plot }, i) => plot.update(
        plot.series.map((name, s) => nowSamples.map((sample) => sample.drawn[i][s])),
        Math.max(NOW_FIRST, nowSamples.length)));
}

/* ---- the memories --------------------------------------------------------------------------- */

/* [{layer, slots, used, kl, top}]: null is what nothing was read for yet. */
function nowMemories(sample) {
    const of = (name, layer) => {
        const found = metricAll(sample, name).find(({ labels }) =>
            labels.layer === layer && (labels.weighting || "weight") === "weight");
        return found && !Number.isNaN(found.value) ? found.value : null;
    };
    return metricAll(sample, "memory_slots").map(({ labels: { layer }, value }) => ({ layer, slots: value,
        used: of("memory_used_ratio", layer), kl: of("memory_kl_nats", layer), top: of("memory_top90_slots", layer) }));
}

/* What one figure of memory i was in all samples, as a small line, and what it is now. */
function nowCell(i, name, format, top) {
    const values = nowSamples.map((sample) => (sample.memories[i] ? sample.memories[i][name] : null));
    const last = values[values.length - 1];
    const axis = top || roundUp(Math.max(...values, 0));
    return make("td", {}, make("span", { className: "spark" },
        svg("svg", { viewBox: "0 0 120 24", preserveAspectRatio: "none", "aria-hidden": "true" },
            svg("path", { class: "axis", d: "M0 23.5H120" }),
            svg("path", { class: "line s0", d: linePath(values, Math.max(NOW_FIRST, values.length), axis, 120, 23) }))),
        last === null ? "–" : format(last));
}

function nowMemory(sample) {
    show($("now-memory"), sample.memories.length > 0);
    const rows = sample.memories.map(({ layer, slots }, i) => make("tr", {},
        make("th", { scope: "row", textContent: "layer " + layer }),
        make("td", { textContent: whole.format(slots) }),
        nowCell(i, "used", percent, 1),
        nowCell(i, "kl", (nats) => short(nats) + " nats"),
        nowCell(i, "top", (n) => whole.format(n))));
    if ($("now-memory").children.length === 0) {
        const head = ["Memory", "Slots", "Used so far", "KL to even use", "Slots with 90 % of the weight"];
        $("now-memory").append(make("h2", { textContent: "Memories" }), wideTable("Memories", head, []),
            make("p", { className: "hint" }));
    }
    /* The table itself stays: it may have been moved sideways, and have the focus. */
    $("now-memory").querySelector("tbody").replaceChildren(...rows);
    $("now-memory").querySelector(".hint").textContent = "A sample, not all: one position in 64, "
        + many(metric(sample, "memory_sampled_positions") || 0, "position")
        + " since the start. So what is used is a lower bound, and grows with the sample.";
}

/* ---- asking --------------------------------------------------------------------------------- */

function nowSay(sample) {
    const info = metricAll(sample, "model_info")[0];
    const build = metricAll(sample, "build_info")[0];
    const begun = sample.value.get("process_start_time_seconds");
    const up = begun ? Math.max(0, sample.at / 1000 - begun) : null;
    const parts = [];
    if (info) {
        parts.push(info.labels.model_name + " · " + info.labels.family + " · " + info.labels.dtype);
    }
    if (build) {
        parts.push("on " + build.labels.backend);
    }
    if (up !== null) {
        parts.push("up for " + (up < 120 ? many(Math.round(up), "second") : up < 7200
            ? many(Math.round(up / 60), "minute") : many(Math.round(up / 3600), "hour")));
    }
    parts.push("asked every two seconds", "plots of five minutes at most");
    $("now-state").textContent = parts.join(" · ");
}

async function nowAsk() {
    const answer = await ask("metrics");
    const sample = { at: Date.now(), value: metricsOf(await rest(answer.text())) };
    nowAdd(sample);
    show($("now-plots"), true);
    nowDraw();
    nowMemory(sample);
    nowSay(sample);
}

function nowTick() {
    if (!document.hidden && !serverIsGone && $("key-form").hidden) {
        nowAsk().catch(troubleShow);
    }
}

function nowStart() {
    if (served.port === "main") {
        $("now-state").textContent = "This server tells its figures at the admin port (--admin-port): open this page there.";
        return;
    }
    if (nowPlots === null) {
        nowPlots = nowMakePlots();
        $("now-plots").replaceChildren(...nowPlots.map(({ plot }) => plot.element));
    }
    if (nowTimer === null) {
        nowTick();
        nowTimer = setInterval(nowTick, NOW_MS);
    }
}

function nowEnd() {
    clearInterval(nowTimer);
    nowTimer = null;
}
