// Small texts that the browser keeps, of a tab or of all tabs: a page that finds none, or broken ones, works with defaults.
'use strict';

/** The browser's store of texts; where it refuses one, a text lasts as long as the page. */
class TextStore {
  /** name: sessionStorage, of one tab, or localStorage, of all. */
  constructor(name) {
    this.name = name;
    this.unkept = new Map();
    this.broken = new Set();
  }

  get(key) {
    try {
      return globalThis[this.name].getItem(key) ?? this.unkept.get(key) ?? null;
    } catch {
      return this.unkept.get(key) ?? null;
    }
  }

  /** Keep a text; false if it lasts no longer than the page. */
  set(key, text) {
    try {
      globalThis[this.name].setItem(key, text);
      this.unkept.delete(key);
      return true;
    } catch {
      this.unkept.set(key, text);
      return false;
    }
  }

  remove(key) {
    this.unkept.delete(key);
    try {
      globalThis[this.name].removeItem(key);
    } catch {
      // What refuses to be read holds nothing.
    }
  }

  /** The value of a text of JSON as `check` gives it; null if there is none. One that cannot be read, or of which
   *  `check` gives null, is removed, and its key is in `broken` from then on. */
  read(key, check) {
    const text = this.get(key);
    if (text === null) return null;
    let value = null;
    try {
      value = check(JSON.parse(text));
    } catch {
      // As if the check had refused it.
    }
    if (value === null) {
      this.broken.add(key);
      this.remove(key);
    }
    return value;
  }
}

const ofTab = new TextStore('sessionStorage');
const ofBrowser = new TextStore('localStorage');

const isRecord = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);
const textOr = (value, other) => (typeof value === 'string' ? value : other);

/** What new conversations begin with, of what was kept; null if that is no record. */
function checkedOptions(value) {
  if (!isRecord(value)) return null;
  const options = Object.entries(isRecord(value.options) ? value.options : {})
    .filter(([name, number]) => OPTIONS.includes(name) && Number.isFinite(number));
  return { model: textOr(value.model, ''), system: textOr(value.system, ''), options: Object.fromEntries(options) };
}
