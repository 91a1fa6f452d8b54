// The chart of all pages: lanes of boxes, and below them memory as a stack of tensors with curves over it, on one axis.
// Each figure.chart contains its data as JSON, written by chart.py. uPlot draws axes, curves and cursors; this file
// draws boxes and tensors, and handles zoom, hovering and keyboard shortcuts.
"use strict";

const AXIS = 92; // width of the axis on the left, the same for all panels so that they are aligned
const LANE = 32;
const BAR = 54;
const MEMORY = 300;
const BINARY = [...Array(60).keys()].map((power) => 2 ** power);
const RATIO = () => window.devicePixelRatio || 1;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function bytesInWords(count) {
  const units = [["PiB", 50], ["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]];
  const [unit, power] = units.find((each) => Math.abs(count) >= 2 ** each[1]) || ["B", 0];
  return power ? `${(count / 2 ** power).toFixed(2)} ${unit}` : `${Math.round(count)} B`;
}

function secondsInWords(seconds) {
  const [unit, factor] = Math.abs(seconds) >= 1 || !seconds ? ["s", 1] : Math.abs(seconds) >= 1e-3 ? ["ms", 1e3] : ["us", 1e6];
  return `${Number((seconds * factor).toPrecision(4))} ${unit}`;
}

/** Returns the labels of an axis' ticks, all in one unit, in which the distance of two ticks is a short number. */
function ticks(unit, values) {
  const span = Math.max(...values.map(Math.abs));
  const least = Math.min(span, 8 * (values[1] - values[0] || Infinity));
  const units = unit === "bytes"
    ? [["PiB", 2 ** 50], ["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]]
    : [["s", 1], ["ms", 1e-3], ["us", 1e-6]];
  const [name, factor] = units.find((each) => least >= each[1]) || units[units.length - 1];
  return values.map((value) => (value ? `${Number((value / factor).toPrecision(9))} ${name}` : "0"));
}

/** As much of a name's end as fits into a width; nothing where that is less than five letters of a longer name. */
function fitted(pen, name, width) {
  if (pen.measureText(name).width <= width) return name;
  for (let letters = name.length - 1; letters >= 5; letters--) {
    const words = `…${name.slice(-letters)}`;
    if (pen.measureText(words).width <= width) return words;
  }
  return "";
}

function element(kind, className, text) {
  const made = document.createElement(kind);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.data = JSON.parse(figure.querySelector("script").textContent);
    this.words = this.data.unit === "bytes" ? bytesInWords : secondsInWords;
    this.stack = new Stack(this.data.tensors);
    this.whole = [0, this.data.end || 1];
    this.pointer = null; // {panel, x, y}: position of the mouse or of the keyboard pointer
    this.tip = element("div", "tip");
    this.tip.hidden = true;
    this.said = element("p", "said");
    this.said.setAttribute("role", "status");
    this.panels = [];
    const plots = element("div", "plots");
    figure.prepend(this.tools(), plots);
    plots.append(this.tip, this.said);
    this.plots = plots;
    this.view = { x: this.whole, y: this.fullHeight(this.whole) };
    const lane = this.data.unit === "bytes" ? BAR : LANE;
    const below = this.hasMemory() ? 16 : this.data.title ? 74 : 48; // the axis, and the distance above
    if (this.data.lanes.length) this.panels.push(this.panel("lanes", this.data.lanes.length * lane + below));
    if (this.hasMemory()) this.panels.push(this.panel("memory", MEMORY));
    this.fit();
    this.show(this.whole, null);
    new ResizeObserver(() => this.fit()).observe(plots);
    const themes = window.matchMedia("(prefers-color-scheme: dark)");
    themes.addEventListener("change", () => this.panels.forEach((each) => each.plot.redraw(false, true)));
    figure.addEventListener("keydown", (event) => this.key(event));
    figure.addEventListener("blur", () => this.point(null));
  }

  hasMemory() {
    const { curves, tensors, rest } = this.data;
    return curves.length > 0 || tensors.length > 0 || rest !== null;
  }

  // -- the view --------------------------------------------------------------------------------------------------

  /** Returns the range of bytes that a view needs. */
  fullHeight([from, to]) {
    const { curves, rest, limit, from_zero } = this.data;
    let lowest = Infinity;
    let highest = 0;
    for (const each of rest ? [...curves, rest] : curves) {
      const last = lastUpTo(each.x.length, to, (i) => each.x[i]);
      for (let i = Math.max(lastUpTo(each.x.length, from, (k) => each.x[k]), 0); i <= last; i++) {
        highest = Math.max(highest, each.y[i]);
        lowest = Math.min(lowest, each.y[i]);
      }
    }
    const { at, all } = this.stack.steps;
    for (let i = Math.max(lastUpTo(at.length, from, (k) => at[k]), 0); i < at.length && at[i] <= to; i++) {
      highest = Math.max(highest, all[i]);
    }
    if (limit !== null && limit <= 2 * highest) highest = Math.max(highest, limit);
    if (from_zero) return [0, 1.05 * highest || 1];
    lowest = Math.min(lowest, 0.9 * highest); // so that a curve that hardly changes looks flat
    const margin = 0.05 * (highest - lowest);
    return [Math.max(lowest - margin, 0), highest + margin || 1];
  }

  /** Shows a range of the axis, and, if `y` is given, a range of bytes. */
  show(x, y) {
    const [from, to] = this.whole;
    const width = Math.min(Math.max(x[1] - x[0], (to - from) * 1e-5), to - from);
    const start = Math.min(Math.max(x[0], from), to - width);
    this.view = { x: [start, start + width], y: y || this.fullHeight([start, start + width]) };
    this.stack.layOut(...this.view.x);
    for (const { plot, kind } of this.panels) {
      plot.batch(() => {
        plot.setScale("x", { min: this.view.x[0], max: this.view.x[1] });
        const [min, max] = kind === "memory" ? this.view.y : [0, this.data.lanes.length];
        plot.setScale("y", { min, max });
      });
    }
    [this.figure.dataset.from, this.figure.dataset.to] = this.view.x;
    this.point(null);
  }

  /** Zooms around the pointer; without a pointer, around the middle. */
  zoom(factor, around) {
    const [from, to] = this.view.x;
    const middle = around ?? this.pointer?.x ?? (from + to) / 2;
    this.show([middle - (middle - from) * factor, middle + (to - middle) * factor], null);
  }

  pan(share) {
    const width = this.view.x[1] - this.view.x[0];
    this.show([this.view.x[0] + share * width, this.view.x[1] + share * width], null);
  }

  fit() {
    const width = Math.max(this.plots.clientWidth, 480);
    for (const { plot } of this.panels) if (plot.width !== width) plot.setSize({ width, height: plot.height });
    this.point(this.pointer);
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  panel(kind, height) {
    const { lanes, curves, title, unit, up: upright } = this.data;
    const isMemory = kind === "memory";
    const panel = { kind };
    const axis = { stroke: () => color("faint"), font: "12px system-ui", ticks: { show: false } };
    const grid = { stroke: () => color("line"), width: 1 };
    const rows = lanes.map((_, lane) => lanes.length - lane - 0.5);
    const up = isMemory
      ? { values: (_, splits) => ticks(upright, splits), grid, ...(upright === "bytes" ? { incrs: BINARY } : {}) }
      : { splits: () => rows, values: () => lanes.map((lane) => lane[0]), grid: { show: false } };
    const across = { values: (_, splits) => ticks(unit, splits), grid, size: 30, gap: 6, space: 90 };
    if (unit === "bytes") across.incrs = BINARY;
    if (!isMemory && this.hasMemory()) Object.assign(across, { values: (_, splits) => splits.map(() => ""), size: 6 });
    else if (title) Object.assign(across, { label: title, labelSize: 22, labelFont: axis.font });
    const options = {
      width: 800,
      height,
      padding: [10, 20, 0, 0],
      legend: { show: false },
      cursor: {
        y: isMemory,
        points: { show: false },
        drag: { x: true, y: isMemory, uni: 40, setScale: false },
        bind: { dblclick: () => () => this.show(this.whole, null) },
      },
      scales: { x: { time: false, range: () => this.view.x }, y: { range: () => this.heights(kind) } },
      axes: [{ ...axis, ...across }, { ...axis, ...up, size: AXIS }],
      series: [{}, ...(isMemory ? curves.map((curve) => this.series(curve)) : [{ show: false }])],
      hooks: {
        drawAxes: [(plot) => this.draw(plot, kind)],
        draw: [(plot) => isMemory && this.marks(plot)],
        setCursor: [(plot) => this.hover(panel, plot)],
        setSelect: [(plot) => this.select(panel, plot)],
      },
    };
    const holder = element("div", kind);
    this.plots.append(holder);
    panel.plot = new uPlot(options, isMemory && curves.length ? joined(curves, this.whole) : [this.whole, [null, null]], holder);
    panel.glass = element("canvas", "glass");
    panel.plot.over.append(panel.glass);
    panel.plot.over.addEventListener("wheel", (event) => this.wheel(event, panel.plot), { passive: false });
    return panel;
  }

  heights(kind) {
    return kind === "memory" ? this.view.y : [0, this.data.lanes.length];
  }

  series(curve) {
    return { stroke: () => color(curve.color), width: 1.8, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) };
  }

  draw(plot, kind) {
    const pen = plot.ctx;
    const { left, top, width, height } = plot.bbox;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width, height);
    pen.clip();
    if (kind === "lanes") this.drawLanes(plot, pen);
    else this.drawStack(plot, pen);
    pen.restore();
  }

  drawLanes(plot, pen) {
    const { lanes, kinds, names } = this.data;
    const [from, to] = this.view.x;
    const ratio = RATIO();
    const ink = color("card");
    const paints = kinds.map((kind) => color(kind[1]));
    pen.font = `${11 * ratio}px system-ui`;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    lanes.forEach(([, boxes], lane) => {
      const top = plot.valToPos(lanes.length - lane - 0.14, "y", true);
      const height = plot.valToPos(lanes.length - lane - 0.86, "y", true) - top;
      let drawn = [-1, -1]; // column and kind of the last narrow box
      for (let i = Math.max(lastUpTo(boxes.length, from, (k) => boxes[k][2]) - 1, 0); i < boxes.length; i++) {
        const [kind, name, start, end] = boxes[i];
        if (start > to) break;
        if (end < from) continue;
        const x = plot.valToPos(Math.max(start, from), "x", true);
        const width = Math.max(plot.valToPos(Math.min(end, to), "x", true) - x, ratio);
        if (width <= ratio && drawn[0] === Math.round(x) && drawn[1] === kind) continue;
        if (width <= ratio) drawn = [Math.round(x), kind];
        pen.fillStyle = paints[kind];
        pen.fillRect(x, top, width > 4 * ratio ? width - ratio : width, height);
        const words = width > 16 * ratio ? fitted(pen, names[name], width - 8 * ratio) : "";
        if (!words) continue;
        pen.fillStyle = ink;
        pen.fillText(words, x + 4 * ratio, top + height / 2);
      }
    });
  }

  drawStack(plot, pen) {
    const { rest, kinds, tensors } = this.data;
    const { steps, segments } = this.stack;
    if (rest) this.fill(plot, pen, rest.x, rest.y, color("pale"));
    if (!steps.at.length) return;
    this.fill(plot, pen, steps.at, steps.all, color("gray"));
    this.fill(plot, pen, steps.at, steps.shown, color("card"));
    const paints = kinds.map((kind) => color(kind[1]));
    const ratio = RATIO();
    const [x0, y0] = [plot.valToPos(0, "x", true), plot.valToPos(0, "y", true)];
    const [kx, ky] = [plot.valToPos(this.whole[1], "x", true) - x0, plot.valToPos(1e6, "y", true) - y0];
    const gap = (height) => (height > 4 * ratio ? ratio : height > 2 * ratio ? ratio / 2 : 0);
    for (const [index, start, end, below] of segments) {
      const [kind, , bytes] = tensors[index];
      const [x, y] = [x0 + (kx * start) / this.whole[1], y0 + (ky * (below + bytes)) / 1e6];
      const height = (-ky * bytes) / 1e6;
      pen.globalAlpha = [1, 0.84, 0.7][index % 3];
      pen.fillStyle = paints[kind];
      pen.fillRect(x, y, (kx * (end - start)) / this.whole[1], height - gap(height));
    }
    pen.globalAlpha = 1;
  }

  /** Fills the area below a step curve. */
  fill(plot, pen, xs, ys, paint) {
    const [from, to] = this.view.x;
    const ground = plot.valToPos(0, "y", true);
    let i = Math.max(lastUpTo(xs.length, from, (k) => xs[k]), 0);
    let x = plot.valToPos(Math.max(xs[i], from), "x", true);
    pen.beginPath();
    pen.moveTo(x, ground);
    for (; i < xs.length && xs[i] <= to; i++) {
      const y = plot.valToPos(ys[i], "y", true);
      pen.lineTo(x, y);
      x = plot.valToPos(i + 1 < xs.length ? Math.min(xs[i + 1], to) : xs[i], "x", true);
      pen.lineTo(x, y);
    }
    pen.lineTo(x, ground);
    pen.fillStyle = paint;
    pen.fill();
  }

  /** Draws the limits, and a dot at each curve's peak. */
  marks(plot) {
    const { curves, limit, mark } = this.data;
    const pen = plot.ctx;
    const { left, top, width, height } = plot.bbox;
    const ratio = RATIO();
    pen.save();
    pen.beginPath();
    pen.rect(left, top - 5 * ratio, width, height + 5 * ratio);
    pen.clip();
    pen.strokeStyle = color("red");
    pen.lineWidth = 1.5 * ratio;
    pen.setLineDash([6 * ratio, 4 * ratio]);
    pen.beginPath();
    if (limit !== null && limit <= this.view.y[1]) {
      const y = plot.valToPos(limit, "y", true);
      pen.moveTo(left, y);
      pen.lineTo(left + width, y);
    }
    if (mark !== null) {
      const x = plot.valToPos(mark, "x", true);
      pen.moveTo(x, top);
      pen.lineTo(x, top + height);
    }
    pen.stroke();
    pen.setLineDash([]);
    for (const curve of curves.filter((each) => each.x.length)) {
      const peak = curve.y.reduce((best, value, i) => (value > curve.y[best] ? i : best), 0);
      pen.fillStyle = color(curve.color);
      pen.strokeStyle = color("card");
      pen.lineWidth = 1.5 * ratio;
      pen.beginPath();
      pen.arc(plot.valToPos(curve.x[peak], "x", true), plot.valToPos(curve.y[peak], "y", true), 4 * ratio, 0, 2 * Math.PI);
      pen.fill();
      pen.stroke();
    }
    pen.restore();
  }
}

/** Returns the value of a curve at a time, that of its last point; null before its first and after its last point. */
function valueAt({ x, y }, moment) {
  const i = lastUpTo(x.length, moment, (k) => x[k]);
  return i < 0 || (i === x.length - 1 && moment > x[i]) ? null : y[i];
}

/** Returns curves, each with its own points, as the columns that uPlot needs. */
function joined(curves, [from, to]) {
  const moments = [...new Set([from, to, ...curves.flatMap((curve) => curve.x)])].sort((one, other) => one - other);
  return [moments, ...curves.map((curve) => moments.map((at) => valueAt(curve, at)))];
}
