/* Part 6: which slots a text read, as "memory": "slots" tells; and how often all traffic read them, as
 * GET /memory/counts tells. */

function bytesOfBase64(text) {
    const letters = atob(text);
    const bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) {
        bytes[i] = letters.charCodeAt(i);
    }
    return bytes;
}

/* The look-ups of a text. Position p of the text, memory m, head h. */
class Trace {
    /* blocks: "slots" of an answer, of arrays with weights; each holds the memories of one shape. */
    constructor(blocks) {
        this.nPosition = 0;
        this.memory = new Map(); /* m: its block, and its place there */
        for (const block of blocks) {
            const indices = new Int32Array(bytesOfBase64(block.indices).buffer);
            const weights = new Float32Array(bytesOfBase64(block.weights).buffer);
            this.nPosition = Math.max(this.nPosition, block.n_position);
            block.memories.forEach((m, place) => this.memory.set(m, { indices, weights, place,
                nMemory: block.memories.length, heads: block.heads, knn: block.knn }));
        }
    }

    memories() {
        return [...this.memory.keys()].sort((a, b) => a - b);
    }

    /* Where the look-ups of a position begin in the block's arrays, and how many they are. */
    at(m, p) {
        const { place, nMemory, heads, knn } = this.memory.get(m);
        return [(p * nMemory + place) * heads * knn, heads * knn];
    }

    /* What a head read at p: [{slot, weight}], the largest weight first. */
    reads(m, p, h) {
        const { indices, weights, knn } = this.memory.get(m);
        const begin = this.at(m, p)[0] + h * knn;
        const found = [];
        for (let i = begin; i < begin + knn; i++) {
            found.push({ slot: indices[i], weight: weights[i] });
        }
        return found.sort((a, b) => b.weight - a.weight || a.slot - b.slot);
    }

    /* Where the text read a slot: [{p, h, weight}], in the order of the text. */
    places(m, slot) {
        const { indices, weights, knn } = this.memory.get(m);
        const found = [];
        for (let p = 0; p < this.nPosition; p++) {
            const [begin, n] = this.at(m, p);
            for (let i = 0; i < n; i++) {
                if (indices[begin + i] === slot) {
                    found.push({ p, h: Math.floor(i / knn), weight: weights[begin + i] });
                }
            }
        }
        return found;
    }

    /* A place to begin with: {p, slot} of a slot of m with much weight at two tokens, not just at one. */
    liveliest(m) {
        const { indices, weights } = this.memory.get(m);
        const seen = new Map(); /* slot: [largest weight, its position, the second largest elsewhere] */
        for (let p = 0; p < this.nPosition; p++) {
            const [begin, n] = this.at(m, p);
            for (let i = begin; i < begin + n; i++) {
                const best = seen.get(indices[i]) || [0, p, 0];
                if (weights[i] >= best[0]) {
                    seen.set(indices[i], [weights[i], p, best[1] === p ? best[2] : best[0]]);
                } else if (p !== best[1]) {
                    best[2] = Math.max(best[2], weights[i]);
                }
            }
        }
        const [slot, [, p]] = [...seen].reduce((a, b) => (b[1][2] > a[1][2] ? b : a));
        return { p, slot };
    }

    /* Calls visit(slot, 1) for every look-up. */
    each(m, visit) {
        const { indices } = this.memory.get(m);
        for (let p = 0; p < this.nPosition; p++) {
            const [begin, n] = this.at(m, p);
            for (let i = begin; i < begin + n; i++) {
                visit(indices[i], 1);
            }
        }
    }
}

/* ---- all traffic ---------------------------------------------------------------------------- */

const COUNTS_BYTES_MAX = 2 ** 28; /* what a page takes: tables of 11 million slots in all */

/* Counts as GET /memory/counts gives them, a safetensors file: an 8-byte length, a JSON header, arrays.
 * For memory I "memories.I.reads", 64-bit integers. */
class Counts {
    constructor(buffer) {
        const length = Number(new DataView(buffer).getBigUint64(0, true));
        this.header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
        this.view = new DataView(buffer, 8 + length);
        this.about = this.header.__metadata__ || {};
    }

    memories() {
        return Object.keys(this.header).map((name) => /^memories\.(\d+)\.reads$/.exec(name))
            .filter((found) => found !== null).map((found) => Number(found[1])).sort((a, b) => a - b);
    }

    nSlot(m) {
        return this.header["memories." + m + ".reads"].shape[0];
    }

    /* How often slot was read: exact to 2^53. */
    reads(m, slot) {
        const at = this.header["memories." + m + ".reads"].data_offsets[0] + 8 * slot;
        return this.view.getUint32(at + 4, true) * 2 ** 32 + this.view.getUint32(at, true);
    }

    /* Calls visit(slot, reads) for the slots that were read. */
    each(m, visit) {
        const n = this.nSlot(m);
        for (let slot = 0; slot < n; slot++) {
            const reads = this.reads(m, slot);
            if (reads > 0) {
                visit(slot, reads);
            }
        }
    }

    /* [counts, ""], or [null, why] where the server tells none: they are at the admin port alone. */
    static async load() {
        if (served.info !== null) {
            return [null, served.info.defaults.memory_counts === true
                ? "What all traffic reads is told at the admin port (--admin-port): open this page there."
                : "What all traffic reads is not counted: --memory-counts on does, and --admin-port opens the port that tells it."];
        }
        try {
            return await countsRead(await ask("memory/counts"));
        } catch (error) {
            if (error.status === 404) {
                return [null, "This server does not count what all traffic reads: start it with --memory-counts on."];
            }
            throw error;
        }
    }
}

/* The answer comes in pieces, without saying how long it is. */
async function countsRead(answer) {
    const reader = answer.body.getReader();
    const pieces = [];
    let bytes = 0;
    for (;;) {
        const { done, value } = await rest(reader.read());
        if (done) {
            return [new Counts(await new Blob(pieces).arrayBuffer()), ""];
        }
        pieces.push(value);
        bytes += value.length;
        if (bytes > COUNTS_BYTES_MAX) {
            await reader.cancel();
            return [null, "The counts have more than " + whole.format(COUNTS_BYTES_MAX) + " bytes, too many for a page: "
                + "save them with curl, and ask pkmserve memory hot or memory inspect."];
        }
    }
}
