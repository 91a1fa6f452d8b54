// Stacks tensors over time, as torch's memory_viz does: a new tensor is placed on top, and those above it move down
// when it is freed. The largest tensors of a view are drawn individually, the others above them as one.
"use strict";

const TENSORS_MAX = 300;

/** Returns the index of the last of `count` sorted values `at(i)` that is not above `value`; -1 if all are above. */
function lastUpTo(count, value, at) {
  let low = 0;
  let high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at(middle) <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

class Stack {
  /** `tensors`: rows of kind, name, bytes, id, and then start and end of each time in memory. */
  constructor(tensors) {
    this.tensors = tensors;
    this.events = [];
    tensors.forEach((tensor, index) => {
      for (let i = 4; i < tensor.length; i += 2) {
        if (tensor[i + 1] > tensor[i]) this.events.push([tensor[i], 1, index], [tensor[i + 1], 0, index]);
      }
    });
    this.events.sort((one, other) => one[0] - other[0] || one[1] - other[1] || one[2] - other[2]);
    this.layOut(-Infinity, Infinity);
  }

  /** Places the tensors for a view; `segments` are [tensor, start, end, bytes below], `steps` the sums over time. */
  layOut(from, to) {
    const { tensors } = this;
    const isSeen = (tensor) => {
      for (let i = 4; i < tensor.length; i += 2) if (tensor[i] < to && tensor[i + 1] > from) return true;
      return false;
    };
    const seen = [...tensors.keys()].filter((index) => isSeen(tensors[index]));
    seen.sort((one, other) => tensors[other][2] - tensors[one][2] || one - other);
    const shown = new Set(seen.slice(0, TENSORS_MAX));
    const live = []; // the tensors that are shown, from the bottom: [tensor, start, bytes below]
    const steps = { at: [], shown: [], all: [], others: [] };
    let bytesShown = 0;
    let bytesOther = 0;
    let others = 0;
    this.segments = [];
    this.steps = steps;
    for (const [at, comes, index] of this.events) {
      const bytes = tensors[index][2];
      if (!shown.has(index)) {
        bytesOther += comes ? bytes : -bytes;
        others += comes ? 1 : -1;
      } else if (comes) {
        live.push([index, at, bytesShown]);
        bytesShown += bytes;
      } else {
        const place = live.findIndex((each) => each[0] === index);
        for (const each of live.slice(place)) {
          if (at > each[1] && at > from && each[1] < to) this.segments.push([each[0], each[1], at, each[2]]);
          each[1] = at;
          each[2] -= bytes;
        }
        live.splice(place, 1);
        bytesShown -= bytes;
      }
      const row = steps.at[steps.at.length - 1] === at ? steps.at.length - 1 : steps.at.length;
      steps.at[row] = at;
      steps.shown[row] = bytesShown;
      steps.all[row] = bytesShown + bytesOther;
      steps.others[row] = others;
    }
  }

  /** Returns the segments at a time, from the bottom. */
  at(moment) {
    const found = this.segments.filter((each) => each[1] <= moment && moment < each[2]);
    return found.sort((one, other) => one[3] - other[3]);
  }

  /** Returns the item at a time and a height: {segment}, {others, bytes}, or nothing. */
  find(moment, height) {
    const { steps } = this;
    const row = lastUpTo(steps.at.length, moment, (i) => steps.at[i]);
    if (row < 0 || height < 0 || height >= steps.all[row]) return null;
    if (height >= steps.shown[row]) return { others: steps.others[row], bytes: steps.all[row] - steps.shown[row] };
    const segment = this.at(moment).find((each) => height < each[3] + this.tensors[each[0]][2]);
    return segment ? { segment } : null;
  }
}
