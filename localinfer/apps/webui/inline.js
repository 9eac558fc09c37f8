// Markdown within a paragraph, read once from left to right, and a paragraph that grows.
'use strict';

const DEEPEST = 6;
const REACH = 1000;         // Characters from a mark or bracket to the one that closes it; else it is text.
const LONGEST_RUN = 100;    // Equal marks that are one.
const LONGEST_TARGET = 2900;  // Of a link, and of an address.
const MARGIN = 16;          // Characters at the end of an unfinished text that may begin a mark or an address.
const MARK = new RegExp([
  `(?<ticks>\`{1,${LONGEST_RUN}})`, `(?<run>\\*{1,${LONGEST_RUN}}|_{1,${LONGEST_RUN}}|~{1,${LONGEST_RUN}})`,
  '(?<bracket>!?\\[)', '(?<address><?https?:\\/\\/[^\\s<>]{1,2000}>?)',
  '\\\\(?<math>[(\\[])', '(?<dollars>\\$\\$)', '\\\\(?<escaped>[!-\'*-/:-@\\\\^-`{-~])',
].join('|'), 'gi');
const TICKS = new RegExp(`\`{1,${LONGEST_RUN}}`, 'g');
const TARGET = new RegExp('\\(\\s{0,9}<?([^\\s<>()]{0,1500}(?:\\([^\\s()]{0,100}\\)[^\\s<>()]{0,100}){0,4})>?'
  + '(?:\\s{1,9}"[^"]{0,400}")?\\s{0,9}\\)', 'y');
const ENDS = { '(': '\\)', '[': '\\]', $$: '$$' };
const TAGS = { '*': ['em', 'strong'], _: ['em', 'strong'], '~': ['del', 'del'] };

/** Append a whole text with emphasis, code and links to a parent. */
function inline(parent, text) {
  parent.append(...new InlineReader(text).nodes());
}

/** Reads a text into parts: texts and elements, in order. before: the character in front of it. isOpen: more will come.
 *  mayLink: links are elements, which cannot stand in each other. */
class InlineReader {
  constructor(text, { before = '', isOpen = false, mayLink = true, depth = 0 } = {}) {
    Object.assign(this, { text, before, isOpen, mayLink, depth });
    this.parts = [];        // { start, end, node: text or element }
    this.runs = [];         // Marks of emphasis that may open; inside: how deep elements behind them are.
    this.deepest = 0;
    this.bottoms = new Map();
    this.ticks = null;      // Places of runs of backticks, by their length.
    this.brackets = null;   // Places of brackets, by those that they close.
    this.nextEnds = new Map();
    this.undecided = text.length;
    this.done = 0;
    this.read();
  }

  nodes() {
    return this.parts.map(({ node }) => node);
  }

  read() {
    const { text } = this;
    const marks = new RegExp(MARK);
    for (let found; (found = marks.exec(text));) marks.lastIndex = this.part(found) ?? marks.lastIndex;
    this.plain(text.length);
  }

  /** Take text that is as it is, up to a place. */
  plain(end) {
    if (end > this.done) this.put(this.done, end, this.text.slice(this.done, end)).isPlain = true;
  }

  put(start, end, node, depth = 0) {
    const part = { start, end, node };
    this.parts.push(part);
    this.done = end;
    this.note(depth);
    return part;
  }

  /** Take what begins at a mark; gives its end, or null if the mark is just text. */
  part({ index, 0: whole, groups }) {
    const { ticks, run, bracket, address, math, dollars, escaped } = groups;
    if (escaped) {
      this.plain(index);
      return this.put(index, index + 2, escaped).end;
    }
    if (run) return this.emphasis(index, run);
    if (ticks) return this.code(index, ticks);
    if (math || dollars) return this.formula(index, math ?? dollars, index + whole.length);
    if (!this.mayLink) return null;
    return bracket ? this.link(index) : this.address(index, address);
  }

  /** Take marks that mean nothing; a text is not divided within them. */
  asText(start, end) {
    this.plain(start);
    return this.put(start, end, this.text.slice(start, end)).end;
  }

  /** Say that what comes, as far as a place, may give another meaning to what stands at one. */
  wait(start, until = start + REACH) {
    if (this.isOpen && until + LONGEST_RUN + MARGIN >= this.text.length) this.undecided = Math.min(this.undecided, start);
  }

  code(start, ticks) {
    const { text } = this;
    if (!this.ticks) {
      this.ticks = new Map();
      for (const { index, 0: { length } } of text.matchAll(TICKS)) {
        if (!this.ticks.has(length)) this.ticks.set(length, []);
        this.ticks.get(length).push(index);
      }
      for (const places of this.ticks.values()) places.reverse();
    }
    const places = this.ticks.get(ticks.length) ?? [];
    while (places.length && places.at(-1) <= start) places.pop();
    const close = places.at(-1);
    if (close === undefined || close > start + REACH) {
      this.wait(start);
      return this.asText(start, start + ticks.length);
    }
    this.plain(start);
    const content = text.slice(start + ticks.length, close);
    const shown = content.trim() ? content.replace(/^ ([^]*) $/, '$1') : content;
    return this.put(start, close + ticks.length, element('code', { textContent: shown })).end;
  }

  /** A formula stays as it was written, its backslashes and what looks like emphasis in it, too. */
  formula(start, kind, inside) {
    const end = ENDS[kind];
    let at = this.nextEnds.get(kind) ?? -1;
    if (at < inside) at = this.text.indexOf(end, inside);
    this.nextEnds.set(kind, at < 0 ? Infinity : at);
    if (at >= 0 && at <= start + REACH) {
      this.plain(start);
      return this.put(start, at + end.length, this.text.slice(start, at + end.length)).end;
    }
    this.wait(start);
    return this.asText(start, inside);
  }

  link(start) {
    const { text } = this;
    const open = text.indexOf('[', start);
    const close = this.closingBracket(open);
    if (close === undefined || close > open + REACH) {
      this.wait(start);
      return null;
    }
    if (close + 1 < text.length && text[close + 1] !== '(') return null;
    TARGET.lastIndex = close + 1;
    const target = TARGET.exec(text);
    const node = target && linkTo(target[1]);
    if (!node) {
      if (!target) this.wait(start, close + LONGEST_TARGET);
      return null;
    }
    const end = TARGET.lastIndex;
    this.plain(start);
    const inner = new InlineReader(text.slice(open + 1, close) || target[1], { mayLink: false, depth: this.depth + 1 });
    node.append(...inner.nodes());
    return this.put(start, end, node, 1 + inner.deepest).end;
  }

  /** The place of the bracket that closes one; undefined if none does. */
  closingBracket(open) {
    if (!this.brackets) {
      this.brackets = new Map();
      const unclosed = [];
      for (const { index, 0: sign } of this.text.matchAll(/\\[^]|[[\]]/g)) {
        if (sign === '[') unclosed.push(index);
        else if (sign === ']' && unclosed.length) this.brackets.set(unclosed.pop(), index);
      }
    }
    return this.brackets.get(open);
  }

  address(start, address) {
    const isMarked = address.startsWith('<') && address.endsWith('>');
    const shown = isMarked ? address.slice(1, -1) : withoutEnd(address, '.,;:!?\'"*_~)]>');
    if (start + address.length === this.text.length) this.wait(start, start + LONGEST_TARGET);
    const node = address.startsWith('<') && !isMarked ? null : linkTo(shown);
    if (!node) return this.asText(start, start + address.length);
    node.append(shown);
    this.plain(start);
    return this.put(start, start + (isMarked ? address.length : shown.length), node).end;
  }

  /** Take a run of marks: it ends what an earlier one began, or may begin what a later one ends. */
  emphasis(start, marks) {
    const { text } = this;
    const [mark] = marks;
    const end = start + marks.length;
    const [former, next] = [text[start - 1] ?? this.before, text[end] ?? ''];
    const isWord = (sign) => /[\p{L}\p{N}]/u.test(sign);
    const canOpen = next !== '' && !/\s/.test(next) && !(mark === '_' && isWord(former));
    const canClose = former !== '' && !/\s/.test(former) && !(mark === '_' && isWord(next));
    if (end === text.length) this.wait(start);
    if (mark === '~' && marks.length !== 2) return this.asText(start, end);
    this.plain(start);
    let left = marks.length;
    while (canClose && left) {
      const opener = this.opener(start, mark, marks.length, canOpen);
      if (!opener) break;
      left -= this.wrap(opener, mark === '~' ? 2 : Math.min(2, opener.count, left), end - left);
    }
    if (!left) return end;
    const part = this.put(end - left, end, mark.repeat(left));
    if (canOpen) this.runs.push({ start: end - left, mark, count: left, length: marks.length, part, canClose, inside: 0 });
    return end;
  }

  /** The last run that one of the same mark may end, of which those behind it then open nothing. */
  opener(at, mark, length, canOpen) {
    const kind = `${mark}${canOpen}${length % 3}`;
    const bottom = Math.max(at - REACH, this.bottoms.get(kind) ?? -1);
    for (let index = this.runs.length - 1; index >= 0 && this.runs[index].start >= bottom; index -= 1) {
      const run = this.runs[index];
      // As in CommonMark, so that **a*b** is not taken apart.
      const isOdd = (run.canClose || canOpen) && (run.length + length) % 3 === 0 && run.length % 3 !== 0;
      if (run.mark === mark && !isOdd) {
        while (this.runs.length > index + 1) this.close();
        return run;
      }
    }
    this.bottoms.set(kind, at);
    return null;
  }

  /** Put all parts behind an opener, the last run, into an element, with so many marks of it; gives their number. */
  wrap(opener, count, end) {
    const depth = 1 + opener.inside;
    if (depth + this.depth > DEEPEST) {
      this.close();
      return this.put(end, end + count, opener.mark.repeat(count)) && count;
    }
    const inside = this.parts.splice(this.parts.lastIndexOf(opener.part) + 1);
    opener.count -= count;
    opener.part.node = opener.mark.repeat(opener.count);
    opener.part.end -= count;
    const start = opener.part.end;
    if (opener.count) opener.inside = 0;
    else {
      this.close();
      this.parts.pop();
    }
    const node = element(TAGS[opener.mark][count - 1]);
    node.append(...inside.map((part) => part.node));
    this.put(start, end + count, node, depth);
    return count;
  }

  /** Take the last run off: it opens nothing any more. */
  close() {
    const { inside } = this.runs.pop();
    this.note(inside);
  }

  /** Note how deep elements are that stand behind the last run. */
  note(depth) {
    this.deepest = Math.max(this.deepest, depth);
    const last = this.runs.at(-1);
    if (last) last.inside = Math.max(last.inside, depth);
  }

  /** The parts at the beginning that no text behind them can change, and where they end. */
  settled() {
    for (const run of this.runs) this.wait(run.start);
    const end = Math.min(this.undecided, this.text.length - MARGIN);
    const nodes = [];
    let at = 0;
    for (const part of this.parts) {
      if (part.end > end) {
        // Texts can be divided, but not between the halves of a character.
        const place = end - Number(/[\uD800-\uDBFF]/.test(this.text[end - 1]));
        if (part.isPlain && place > part.start) {
          nodes.push(this.text.slice(part.start, place));
          at = place;
        }
        break;
      }
      nodes.push(part.node);
      at = part.end;
    }
    return { nodes, end: at };
  }
}

/** A paragraph that grows: what nothing can change any more stays, and the rest of it is shown anew. */
class Paragraph {
  constructor() {
    this.node = element('p', { dir: 'auto' });
    this.rest = element('span', { className: 'tail' });
    this.node.append(this.rest);
    this.text = '';      // What is not settled.
    this.before = '';
    this.held = null;    // The last line, if it may be the head of a table.
    this.isBegun = false;
    this.isFlowing = false;
    this.isStale = false;
  }

  /** Take a line, or its beginning. */
  line(text, isCut) {
    const line = `${this.isBegun ? '\n' : ''}${text}`;
    this.release();
    if (!isCut && text.includes('|')) this.held = line;
    else this.text += line;
    this.isBegun = this.isStale = true;
  }

  /** Take more of the last line. */
  add(text) {
    this.text += text.replaceAll('\r', '');
    this.isStale = this.isFlowing = true;
  }

  endLine() {
    this.isFlowing = false;
    this.isStale = true;
  }

  release() {
    this.text += this.held ?? '';
    this.held = null;
  }

  /** Take the last line back; false if nothing is left. */
  withoutHead() {
    this.held = null;
    return Boolean(this.text || this.before);
  }

  /** Show what was taken, and a line behind it that is not finished. */
  show(line = null) {
    if (this.isStale) this.settle();
    const text = this.text + (this.held ?? '');
    const more = line === null ? '' : `${this.isBegun ? '\n' : ''}${line}`;
    const shown = line === null && !this.isFlowing ? text : likely(text + more);
    this.rest.replaceChildren(...new InlineReader(shown, { before: this.before }).nodes());
    this.isStale = false;
  }

  settle() {
    const { nodes, end } = new InlineReader(this.text, { before: this.before, isOpen: true }).settled();
    if (!end) return;
    this.rest.remove();
    this.node.append(...nodes, this.rest);
    this.before = this.text[end - 1];
    this.text = this.text.slice(end);
  }

  /** Show all as it stays. */
  end() {
    this.release();
    this.rest.remove();
    this.node.append(...new InlineReader(this.text, { before: this.before }).nodes());
  }
}

/** A text without the signs that it ends with. */
function withoutEnd(text, signs) {
  let end = text.length;
  while (end && signs.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

/** An unfinished text as it will probably look: marks that it ends with may be halves, and open ones will be closed. */
function likely(text) {
  const shown = withoutEnd(text, '*_~`');
  const isOdd = (mark, within) => within.split(mark).length % 2 === 0;
  if (isOdd('`', shown)) return `${shown}\``;
  return isOdd('**', shown.replace(/`[^`]*`/g, '')) ? `${shown.trimEnd()}**` : shown;
}

/** An empty link that opens apart and tells the other side nothing; null for what is no address of the web or mail. */
function linkTo(address) {
  if (!/^(https?:\/\/|mailto:)\S/i.test(address) || !URL.canParse(address)) return null;
  return element('a', { href: address, title: address, target: '_blank', rel: 'noopener noreferrer',
    referrerPolicy: 'no-referrer' });
}
