/* Part 3: our own plots. SVG for lines over time and along a text, a canvas for the map of a table. */

function svg(name, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) {
        element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
}

/* The next of 1, 2, 5, 10, 20 ... that is not below x: the top of an axis. */
function roundUp(x) {
    if (!(x > 0)) {
        return 1;
    }
    const ten = 10 ** Math.floor(Math.log10(x));
    return [1, 2, 5, 10].map((step) => step * ten).find((top) => top >= x * 0.999999);
}

/* The path of values over an axis of n places, 0 ... n-1; null breaks the line. */
function linePath(values, n, top, width, height) {
    let path = "";
    let isOpen = false;
    values.forEach((value, i) => {
        if (value === null || Number.isNaN(value)) {
            isOpen = false;
            return;
        }
        const x = width * (n - values.length + i) / Math.max(1, n - 1);
        const y = height - height * Math.min(1, value / top);
        path += (isOpen ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1);
        isOpen = true;
    });
    return path;
}

/* One figure over the last minutes: a title, what it is now, a line for each series. */
class TimePlot {
    /* series: names, of which one alone needs no key. format: a value as text. top: of the axis, if fixed. */
    constructor({ title, note = "", series, format, top = null }) {
        this.series = series;
        this.format = format;
        this.top = top;
        this.now = make("p", { className: "value" });
        this.lines = series.map((name, i) => svg("path", { class: "line s" + i }));
        this.svg = svg("svg", { viewBox: "0 0 300 70", preserveAspectRatio: "none", role: "img" },
            svg("path", { class: "axis", d: "M0 0.5H300M0 69.5H300" }), ...this.lines);
        this.title = title;
        this.most = make("span", {});
        this.element = make("figure", { className: "plot" },
            make("figcaption", {}, make("h2", { textContent: title }), this.now),
            make("div", { className: "frame" }, this.svg, this.most),
            note === "" ? null : make("p", { className: "hint", textContent: note }));
    }

    /* values: for each series what it was, oldest first; n: places of the axis. */
    update(values, n) {
        const seen = values.flat().filter((value) => value !== null && !Number.isNaN(value));
        const top = this.top || roundUp(Math.max(...seen, 0));
        values.forEach((each, i) => this.lines[i].setAttribute("d", linePath(each, n, top, 300, 70)));
        this.now.replaceChildren(...this.series.map((name, i) => {
            const last = values[i].length > 0 ? values[i][values[i].length - 1] : null;
            return make("span", { className: "s" + i },
                make("b", { textContent: last === null ? "–" : this.format(last) }),
                this.series.length > 1 ? " " + name : "");
        }));
        this.most.textContent = this.format(top);
        this.svg.setAttribute("aria-label", this.title + ", now " + this.now.textContent + ", axis to " + this.format(top));
    }
}

/* Surprise along a text: its mean and most over stretches of tokens. onChoose(i): a place was clicked. */
function surpriseStrip(tokens, onChoose) {
    const n = Math.min(tokens.length, 240);
    const of = (i) => Math.floor(i * tokens.length / n);
    const mean = [];
    const most = [];
    for (let i = 0; i < n; i++) {
        const bits = tokens.slice(of(i), Math.max(of(i) + 1, of(i + 1)))
            .map((token) => Math.min(token.bits ?? 0, 99));
        mean.push(bits.reduce((sum, each) => sum + each, 0) / bits.length);
        most.push(Math.max(...bits));
    }
    const top = roundUp(Math.max(...most, 1));
    const width = 600 / n;
    const bars = most.map((each, i) => "M" + (i * width).toFixed(1) + " 60v" + (-60 * each / top).toFixed(1)
        + "h" + (width * 0.86).toFixed(1) + "V60z").join("");
    const picture = svg("svg", { viewBox: "0 0 600 60", preserveAspectRatio: "none", role: "img",
        "aria-label": "Surprise along the text, axis to " + top + " bits" },
        svg("path", { class: "bars", d: bars }));
    if (tokens.length > n) {
        picture.append(svg("path", { class: "line s0", d: linePath(mean, n, top, 600, 60) }));
    }
    picture.addEventListener("click", (event) => {
        const box = picture.getBoundingClientRect();
        onChoose(Math.min(tokens.length - 1, Math.floor((event.clientX - box.left) / box.width * tokens.length)));
    });
    return make("div", {}, make("p", { className: "hint", textContent: "Surprise along the text, from 0 to " + top + " bits"
        + (tokens.length > n ? ": the most of each stretch, and its mean" : "") }),
        make("div", { className: "frame" }, picture));
}

/* ---- the map -------------------------------------------------------------------------------- */

const MAP_CELLS_MAX = 256; /* along a side: larger tables have several slots in a cell */

/* A table's slots as a square. Of a product-key memory the row is the first half's key, the column the
 * second's: slot = row · side + column. */
class TableMap {
    /* onChoose(slot), onPoint(slot, reads, slots of the cell). */
    constructor(canvas, { onChoose, onPoint }) {
        this.canvas = canvas;
        this.onChoose = onChoose;
        this.onPoint = onPoint;
        this.nSlot = 0;
        this.cursor = -1;
        this.ring = -1;
        canvas.addEventListener("pointermove", (event) => this.point(this.cellAt(event)));
        canvas.addEventListener("click", (event) => this.choose(this.cellAt(event)));
        canvas.addEventListener("keydown", (event) => this.key(event));
        matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    }

    /* each(visit) calls visit(slot, reads) for what was read; a slot may come more than once. */
    set(nSlot, each) {
        this.nSlot = nSlot;
        this.side = Math.ceil(Math.sqrt(nSlot));
        this.cells = Math.min(this.side, MAP_CELLS_MAX);
        this.reads = new Float64Array(this.cells * this.cells);
        this.best = new Map(); /* cell: slot: reads, for cells of several slots */
        each((slot, n) => {
            const cell = this.cellOf(slot);
            this.reads[cell] += n;
            if (this.cells < this.side && n > 0) {
                const slots = this.best.get(cell) || new Map();
                slots.set(slot, (slots.get(slot) || 0) + n);
                this.best.set(cell, slots);
            }
        });
        this.cursor = Math.min(this.cursor, this.cells * this.cells - 1);
        this.draw();
    }

    cellOf(slot) {
        const row = Math.floor(Math.floor(slot / this.side) * this.cells / this.side);
        const column = Math.floor(slot % this.side * this.cells / this.side);
        return row * this.cells + column;
    }

    /* The slot of a cell that was read most. */
    slotOf(cell) {
        if (this.cells === this.side) {
            return cell < this.nSlot ? cell : -1;
        }
        const slots = this.best.get(cell);
        return slots ? [...slots].reduce((a, b) => (b[1] > a[1] ? b : a))[0] : -1;
    }

    cellAt(event) {
        const box = this.canvas.getBoundingClientRect();
        const along = (at) => Math.max(0, Math.min(this.cells - 1, Math.floor(at * this.cells)));
        return along((event.clientY - box.top) / box.height) * this.cells
            + along((event.clientX - box.left) / box.width);
    }

    point(cell) {
        const slot = this.slotOf(cell);
        if (slot >= 0) {
            this.onPoint(slot, this.reads[cell], this.cells < this.side);
        }
    }

    choose(cell) {
        const slot = this.slotOf(cell);
        this.cursor = cell;
        if (slot >= 0) {
            this.onChoose(slot);
        }
        this.draw();
    }

    key(event) {
        const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.cells, ArrowUp: -this.cells }[event.key];
        if (step !== undefined) {
            const to = Math.max(0, this.cursor) + (this.cursor < 0 ? 0 : step);
            this.cursor = to >= 0 && to < this.reads.length ? to : this.cursor;
            this.point(this.cursor);
            this.draw();
        } else if ((event.key === "Enter" || event.key === " ") && this.cursor >= 0) {
            this.choose(this.cursor);
        } else {
            return;
        }
        event.preventDefault();
    }

    /* Draws a ring around the slot; -1: none. */
    mark(slot) {
        this.ring = slot;
        this.draw();
    }

    ringAround(context, cell, colour, width) {
        const size = this.canvas.width / this.cells;
        context.strokeStyle = colour;
        context.lineWidth = width;
        context.beginPath();
        context.arc((cell % this.cells + 0.5) * size, (Math.floor(cell / this.cells) + 0.5) * size,
            size / 2 + 5, 0, 2 * Math.PI);
        context.stroke();
    }

    draw() {
        if (this.nSlot === 0) {
            return;
        }
        const style = getComputedStyle(this.canvas);
        const colour = (name) => style.getPropertyValue(name).trim().split(/\s+/).map(Number);
        const stops = [colour("--map-0"), colour("--map-1"), colour("--map-2")];
        const most = Math.log1p(this.reads.reduce((a, b) => Math.max(a, b), 1));
        const small = new OffscreenCanvas(this.cells, this.cells);
        const image = new ImageData(this.cells, this.cells);
        this.reads.forEach((n, cell) => {
            const inTable = this.cells < this.side || cell < this.nSlot;
            const share = n > 0 ? Math.log1p(n) / most : 0;
            const from = n > 0 ? stops[1] : stops[0];
            const to = n > 0 ? stops[2] : stops[0];
            for (let c = 0; c < 3; c++) {
                image.data[4 * cell + c] = from[c] + (to[c] - from[c]) * share;
            }
            image.data[4 * cell + 3] = inTable ? 255 : 0;
        });
        small.getContext("2d").putImageData(image, 0, 0);
        const context = this.canvas.getContext("2d");
        context.imageSmoothingEnabled = false;
        context.clearRect(0, 0, this.canvas.width, this.canvas.height);
        context.drawImage(small, 0, 0, this.canvas.width, this.canvas.height);
        if (this.cursor >= 0 && document.activeElement === this.canvas) {
            this.ringAround(context, this.cursor, style.getPropertyValue("--ink"), 2);
        }
        if (this.ring >= 0 && this.ring < this.nSlot) {
            this.ringAround(context, this.cellOf(this.ring), style.getPropertyValue("--heat"), 3);
        }
    }
}
