// Reactions of a chart to mouse and keyboard: the tooltip, the outline of a tensor, zoom and steps.
"use strict";

const HINT =
  "Drag to zoom in, double-click for the whole. Keys: ← → ↑ ↓ move the pointer, + − zoom, Shift ← → pan, 0 the whole.";
const near = (plot) => (plot.scales.x.max - plot.scales.x.min) / Math.max(plot.bbox.width, 1);

Object.assign(Chart.prototype, {
  /** Adds the buttons above a chart. */
  tools() {
    const bar = element("div", "tools");
    const actions = [["−", "zoom out", () => this.zoom(2)], ["+", "zoom in", () => this.zoom(0.5)]];
    for (const [sign, words, act] of [...actions, ["whole", "show the whole", () => this.show(this.whole, null)]]) {
      const button = element("button", "", sign);
      button.type = "button";
      button.setAttribute("aria-label", words);
      button.addEventListener("click", act);
      bar.append(button);
    }
    const isFirst = this.figure === document.querySelector("figure.chart");
    bar.prepend(element("span", "hint", isFirst ? HINT : ""));
    return bar;
  },

  key(event) {
    if (!this.panels.length || event.target !== this.figure || event.ctrlKey || event.metaKey || event.altKey) return;
    const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const up = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (across && event.shiftKey) this.pan(0.25 * across);
    else if (across) this.move(across);
    else if (up) this.step(up);
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0" || event.key === "Home") this.show(this.whole, null);
    else if (event.key === "Escape") this.point(null);
    else return;
    event.preventDefault();
    this.said.textContent = this.tip.hidden ? "" : [...this.tip.children].map((line) => line.textContent).join(", ");
  },

  wheel(event, plot) {
    if (!(event.ctrlKey || event.metaKey)) return; // the page scrolls
    event.preventDefault();
    const left = event.clientX - plot.over.getBoundingClientRect().left;
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, plot.posToVal(left, "x"));
  },

  /** Handles the end of a drag. */
  select(panel, plot) {
    const { left, top, width, height } = plot.select;
    if (width < 3) return;
    const x = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    const isBox = panel.kind === "memory" && height < plot.over.clientHeight - 2;
    const y = isBox ? [plot.posToVal(top + height, "y"), plot.posToVal(top, "y")] : null;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.show(x, y);
  },

  hover(panel, plot) {
    const { left, top } = plot.cursor;
    if (left === null || left === undefined || left < 0) this.point(null);
    else this.point({ panel, x: plot.posToVal(left, "x"), y: plot.posToVal(top, "y") });
  },

  /** Moves the pointer by a hundredth of the view. */
  move(direction) {
    const [from, to] = this.view.x;
    const at = this.pointer;
    if (!at) this.point(this.rowsAt((from + to) / 2)[0]);
    else this.point({ ...at, x: Math.min(Math.max(at.x + (direction * (to - from)) / 100, from), to) });
  },

  /** Moves the pointer to the next box or tensor below or above. */
  step(direction) {
    const at = this.pointer;
    if (!at) {
      this.move(0);
      return;
    }
    const place = (row) => this.panels.indexOf(row.panel);
    const isAhead = (row) =>
      row.panel === at.panel ? (at.y - row.y) * direction > 1e-9 * at.y : (place(row) - place(at)) * direction > 0;
    const rows = this.rowsAt(at.x).filter(isAhead);
    if (rows.length) this.point(direction > 0 ? rows[0] : rows[rows.length - 1]);
  },

  /** Returns the items at a time from the top: boxes, and the middle of each tensor and of the tensors drawn as one. */
  rowsAt(moment) {
    const rows = [];
    for (const panel of this.panels) {
      const isLanes = panel.kind === "lanes";
      const heights = isLanes ? this.data.lanes.map((_, lane) => this.data.lanes.length - lane - 0.5) : this.heightsAt(moment);
      const found = heights.map((y) => ({ panel, x: moment, y }));
      rows.push(...(isLanes ? found.filter((row) => this.find(row)) : found));
    }
    return rows.length ? rows : [{ panel: this.panels[0], x: moment, y: 0 }];
  },

  /** Returns the middle of each tensor in memory at a time, and of the tensors drawn as one, from the top. */
  heightsAt(moment) {
    const found = this.stack.at(moment).map(([index, , , below]) => below + this.data.tensors[index][2] / 2);
    const { at, shown, all } = this.stack.steps;
    const row = lastUpTo(at.length, moment, (i) => at[i]);
    if (row >= 0 && all[row] > shown[row]) found.push((all[row] + shown[row]) / 2);
    const rest = this.data.rest ? valueAt(this.data.rest, moment) : null;
    const top = row >= 0 ? all[row] : 0;
    if (rest !== null && rest > top) found.push((rest + top) / 2);
    return found.length ? found.reverse() : [(this.view.y[0] + this.view.y[1]) / 2];
  },

  /** Moves the pointer to a place of a panel, and shows cursors, tooltip and outlines; null removes the pointer. */
  point(pointer) {
    this.pointer = pointer;
    const found = pointer ? this.find(pointer) : null;
    for (const panel of this.panels) {
      const { plot } = panel;
      const left = pointer ? plot.valToPos(pointer.x, "x") : -10;
      plot.setCursor({ left, top: pointer?.panel === panel ? plot.valToPos(pointer.y, "y") : -10 }, false);
      this.outline(panel, found);
    }
    this.tip.hidden = !found;
    if (!found) return;
    this.tip.replaceChildren(...found.lines.map((line, i) => element("div", i ? "" : "strong", line)));
    const { over } = pointer.panel.plot;
    const box = over.getBoundingClientRect();
    const frame = this.plots.getBoundingClientRect();
    const x = box.left - frame.left + pointer.panel.plot.valToPos(pointer.x, "x");
    const y = box.top - frame.top + pointer.panel.plot.valToPos(pointer.y, "y");
    const isRight = x + 16 + this.tip.offsetWidth > frame.width;
    this.tip.style.left = `${isRight ? Math.max(x - 16 - this.tip.offsetWidth, 0) : x + 16}px`;
    this.tip.style.top = `${Math.max(y - this.tip.offsetHeight - 8, 0)}px`;
  },

  /** Returns the lines of the tooltip for a place, and the tensor to outline. */
  find({ panel, x, y }) {
    return panel.kind === "lanes" ? this.findBox(panel, x, y) : this.findBytes(x, y);
  },

  findBox(panel, x, y) {
    const { lanes, kinds, names } = this.data;
    const row = lanes[lanes.length - 1 - Math.floor(y)];
    if (!row) return null;
    const boxes = row[1];
    const slack = 2 * near(panel.plot);
    let i = lastUpTo(boxes.length, x, (k) => boxes[k][2]);
    if (i < 0 || boxes[i][3] < x - slack) i = i + 1 < boxes.length && boxes[i + 1][2] <= x + slack ? i + 1 : -1;
    if (i < 0) return null;
    const [kind, name, start, end, bytes, tensor] = boxes[i];
    const isTime = this.data.unit === "seconds";
    const size = bytes ? bytesInWords(bytes) : "";
    const about = [kinds[kind][0], isTime ? secondsInWords(end - start) : "", size].filter((each) => each !== names[name]);
    const when = isTime ? [`${this.words(start)} – ${this.words(end)}`] : [];
    return { lines: [names[name] || kinds[kind][0], about.filter(Boolean).join(", "), ...when], tensor, box: [row, boxes[i]] };
  },

  findBytes(x, y) {
    const { tensors, kinds, names, rest, curves } = this.data;
    const found = this.stack.find(x, y);
    const over = curves.map((curve) => [curve.name, valueAt(curve, x)]).filter((each) => each[1] !== null);
    const inWords = this.data.up === "bytes" ? bytesInWords : secondsInWords;
    const lines = over.map(([name, value]) => `${name}: ${inWords(value)}`);
    const at = `at ${this.words(x)}`;
    if (found?.segment) {
      const [kind, name, bytes, id, ...times] = tensors[found.segment[0]];
      const spans = times.flatMap((time, i) => (i % 2 ? [] : [`${this.words(time)} – ${this.words(times[i + 1])}`]));
      const about = [`${bytesInWords(bytes)}, ${kinds[kind][0]}`, `in memory ${spans.join(" and ")}`];
      return { lines: [names[name], ...about, ...lines], tensor: id };
    }
    if (found) return { lines: [`other: ${found.others} tensors`, bytesInWords(found.bytes), at, ...lines], tensor: -1 };
    const below = this.stack.steps.at.length ? this.bytesOfTensors(x) : 0;
    const total = rest ? valueAt(rest, x) : null;
    if (total !== null && y >= 0 && y < total) return { lines: [rest.name, bytesInWords(total - below), at, ...lines], tensor: -1 };
    return lines.length ? { lines: [at, ...lines], tensor: -1 } : null;
  },

  bytesOfTensors(moment) {
    const { at, all } = this.stack.steps;
    const row = lastUpTo(at.length, moment, (i) => at[i]);
    return row < 0 ? 0 : all[row];
  },

  /** Outlines the tensor or box at the pointer, and the same tensor everywhere else in the chart. */
  outline({ plot, kind, glass }, found) {
    const ratio = RATIO();
    const [width, height] = [plot.over.clientWidth, plot.over.clientHeight];
    if (glass.width !== Math.round(width * ratio)) glass.width = Math.round(width * ratio);
    if (glass.height !== Math.round(height * ratio)) glass.height = Math.round(height * ratio);
    const pen = glass.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    if (!found) return;
    pen.strokeStyle = color("ink");
    pen.lineWidth = 2;
    const frame = (start, end, top, bottom) => {
      const [x, y] = [plot.valToPos(start, "x"), plot.valToPos(top, "y")];
      pen.strokeRect(x, y, Math.max(plot.valToPos(end, "x") - x, 1), plot.valToPos(bottom, "y") - y);
    };
    const isSame = (tensor) => found.tensor >= 0 && tensor === found.tensor;
    if (kind === "lanes") {
      const { lanes } = this.data;
      lanes.forEach((row, lane) => {
        for (const box of row[1]) {
          if (isSame(box[5]) || (found.box && found.box[1] === box)) {
            frame(box[2], box[3], lanes.length - lane - 0.14, lanes.length - lane - 0.86);
          }
        }
      });
    } else if (found.tensor >= 0) {
      for (const [index, start, end, below] of this.stack.segments) {
        if (isSame(this.data.tensors[index][3])) frame(start, end, below + this.data.tensors[index][2], below);
      }
    }
  },
});

document.querySelectorAll("figure.chart").forEach((figure) => {
  figure.chart = new Chart(figure);
});
