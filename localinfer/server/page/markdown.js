// Markdown within a paragraph.
'use strict';

const DEEPEST = 6;
const MARK = /(`+)|(\*\*|__|~~|\*|_)|(!?\[)|(<?https?:\/\/[^\s<>]+>?)|\\([!-/:-@[-`{-~])/g;
const LABEL = /!?\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]/;
const TARGET = /\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/;
const LINK = new RegExp(LABEL.source + TARGET.source, 'y');
const TAGS = { '**': 'strong', __: 'strong', '*': 'em', _: 'em', '~~': 'del' };

/** Append text with emphasis, code and links to a parent. */
function inline(parent, text, depth = 0, mayLink = true) {
  const marks = new RegExp(MARK);
  const unclosed = new Set();
  let done = 0;
  const plain = (end) => end > done && parent.append(text.slice(done, end));
  for (let found; depth < DEEPEST && (found = marks.exec(text));) {
    const part = inlinePart(text, found, depth, unclosed, mayLink);
    if (!part) continue;
    plain(found.index);
    parent.append(part.node);
    done = marks.lastIndex = part.end;
  }
  plain(text.length);
}

/** What begins at a mark, as a node and its end; null if the mark is just text. */
function inlinePart(text, found, depth, unclosed, mayLink) {
  const [whole, ticks, emphasis, bracket, address, escaped] = found;
  const start = found.index + whole.length;
  if (escaped) return { node: escaped, end: start };
  if (ticks) return codeSpan(text, ticks, start);
  if (emphasis) {
    const end = unclosed.has(emphasis) ? -1 : closing(text, emphasis, found.index);
    if (end === -1) unclosed.add(emphasis);
    if (end < 0) return null;
    const node = element(TAGS[emphasis]);
    inline(node, text.slice(start, end), depth + 1, mayLink);
    return { node, end: end + emphasis.length };
  }
  if (!mayLink) return null;
  if (bracket) {
    LINK.lastIndex = found.index;
    const parts = LINK.exec(text);
    const node = parts && linkTo(parts[2]);
    if (!node) return null;
    inline(node, parts[1] || parts[2], depth + 1, false);
    return { node, end: LINK.lastIndex };
  }
  const isMarked = address.startsWith('<') && address.endsWith('>');
  const shown = isMarked ? address.slice(1, -1) : withoutEnd(address, '.,;:!?\'"*_~)]>');
  const node = address.startsWith('<') && !isMarked ? null : linkTo(shown);
  if (!node) return null;
  node.append(shown);
  return { node, end: found.index + (isMarked ? address.length : shown.length) };
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

function codeSpan(text, ticks, start) {
  let end = text.indexOf(ticks, start);
  while (end >= 0 && (text[end + ticks.length] === '`' || text[end - 1] === '`')) end = text.indexOf(ticks, end + 1);
  if (end < 0) return null;
  const content = text.slice(start, end);
  return { node: element('code', { textContent: content.trim() ? content.replace(/^ (.*) $/s, '$1') : content }),
    end: end + ticks.length };
}

/** Where emphasis ends that opens at a place: -1 if nowhere from there on, -2 if it cannot open there. */
function closing(text, mark, at) {
  const start = at + mark.length;
  const isWord = (index) => /[\p{L}\p{N}]/u.test(text[index] ?? '');
  if (!text[start] || /\s/.test(text[start]) || (mark[0] === '_' && isWord(at - 1))) return -2;
  for (let end = text.indexOf(mark, start + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const isPart = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    if (isPart) end += text[end + 1] === mark ? 1 : 0;
    else if (!/\s/.test(text[end - 1]) && !(mark[0] === '_' && isWord(end + mark.length))) {
      return mark.length === 2 && text[start] === mark[0] && text[end + 2] === mark[0] ? end + 1 : end;
    }
  }
  return -1;
}

/** An empty link that opens apart and tells the other side nothing; null for what is no address of the web or mail. */
function linkTo(address) {
  if (!/^(https?:\/\/|mailto:)\S/i.test(address) || !URL.canParse(address)) return null;
  return element('a', { href: address, title: address, target: '_blank', rel: 'noopener noreferrer',
    referrerPolicy: 'no-referrer' });
}

// Markdown in blocks, as it comes: what a finished line became stays, only the last line is shown anew.

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DELIMITERS = /^(?:\| *)?:?-+:? *(?:\| *:?-+:? *)*\|?$/;
const MARKS_ONLY = /^(?:[#>*+\-|`~=_\s]|\d{1,9}[.)]?\s*$)*$/;

const cellsOf = (row) => row.trim().replace(/^\||(?<!\\)\|$/g, '').split(/(?<!\\)\|/).map((cell) => cell.trim());
const untabbed = (line) => line.replace(/^[ \t]+/, (space) => space.replaceAll('\t', '    '));
const indentOf = (line) => line.length - line.trimStart().length;

/** Shows Markdown in an element while it comes. */
class MarkdownView {
  constructor(root, depth = 0) {
    this.root = root;
    this.depth = depth;
    this.rest = '';
    this.open = null;
    this.undoTail = null;
    this.numBegun = 0;  // Characters of the unfinished line that have begun an item or a quotation.
  }

  /** Take more text. */
  feed(text) {
    const lines = (this.rest + text).split('\n');
    this.rest = lines.pop();
    for (const line of lines) this.line(line);
    this.tail(this.rest);
    this.settle();
  }

  /** The text has ended. */
  end() {
    if (this.rest) this.line(this.rest);
    this.rest = '';
    this.settle();
  }

  /** Take a finished line. */
  line(text) {
    this.dropTail();
    const line = untabbed(text.replace(/\r$/, ''));
    if (this.open?.code) return this.codeLine(line);
    const begun = this.numBegun;
    this.numBegun = 0;
    if (begun) return this.open.inner.line(line.slice(begun));
    const inside = this.inside(line);
    if (inside !== null) return this.open.inner.line(inside);
    if (!line.trim()) return this.become(null);
    return this.startBlock(line) || this.paragraphLine(line);
  }

  /** Show a line that is not finished, until the next call. */
  tail(unfinished) {
    this.dropTail();
    const text = untabbed(unfinished);
    if (this.open?.code) {
      if (text.replaceAll(this.open.fence[0], '').trim()) {
        highlight(this.open.tail, text, this.open.tokens, this.open.until);
      }
      return;
    }
    if (!this.numBegun && (!text.trim() || MARKS_ONLY.test(text))) return;
    const inside = this.numBegun ? text.slice(this.numBegun) : this.inside(text);
    if (inside !== null) this.innerTail(inside);
    else if (this.open?.lines && !this.isBlockStart(text)) {
      const { open } = this;
      this.showParagraph(open, [likely([...open.lines, text.trim()].join('\n'))]);
      this.undoTail = () => { open.isStale = true; };
    } else if (this.depth < DEEPEST && (QUOTE.test(text) || ITEM.test(text)) && this.isBlockStart(text)) {
      const rest = QUOTE.exec(text)?.[1] ?? ITEM.exec(text)[4];
      this.startBlock(text.slice(0, text.length - rest.length), true);
      this.numBegun = text.length - rest.length;
      this.innerTail(rest);
    } else if (!this.open?.aligns || !text.includes('|')) {
      const node = element('div', { className: 'tail' });
      this.root.append(node);
      const view = new MarkdownView(node, this.depth);
      view.line(FENCE.test(text) ? text : likely(text));
      view.settle();
      this.undoTail = () => node.remove();
    }
  }

  innerTail(text) {
    const { inner } = this.open;
    inner.tail(text);
    this.undoTail = () => inner.dropTail();
  }

  dropTail() {
    this.open?.tail?.replaceChildren();
    this.undoTail?.();
    this.undoTail = null;
  }

  /** Show what was taken and not shown yet. */
  settle() {
    if (this.open?.isStale) this.showParagraph(this.open, this.open.lines);
    this.open?.inner?.settle();
  }

  /** Close the open block, and open another. */
  become(open) {
    this.settle();
    this.open = open;
    return true;
  }

  /** What a line adds to the open item or quotation; null if it is not part of it. */
  inside(line) {
    const { open } = this;
    if (!open?.inner) return null;
    if (open.quote) return QUOTE.exec(line)?.[1] ?? null;
    if (!line.trim()) {
      open.isLoose = true;
      return '';
    }
    const indent = indentOf(line);
    if (indent >= open.indent + 2) return line.slice(Math.min(indent, open.content));
    const isLazy = !open.isLoose && !this.isBlockStart(line) && open.inner.open?.lines;
    return isLazy ? line.trim() : null;
  }

  isBlockStart(line) {
    const item = ITEM.exec(line);
    return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)
      || (item !== null && item[4] !== '' && (!/\d/.test(item[2]) || !this.open?.lines || parseInt(item[2], 10) === 1));
  }

  /** Begin a block with a line, or add a row to a table; false if the line is just text. */
  startBlock(line, isBegun = false) {
    if (this.open?.aligns && line.includes('|')) return this.tableRow(this.open, line, 'td');
    if (this.open?.lines && DELIMITERS.test(line.trim()) && this.startTable(line)) return true;
    if (!isBegun && !this.isBlockStart(line)) return false;
    const fence = FENCE.exec(line);
    if (fence && !isBegun) return this.startCode(fence[1], fence[2].trim().split(/\s/)[0], indentOf(line));
    const heading = HEADING.exec(line);
    if (heading) return this.put(`h${Math.min(6, heading[1].length + 1)}`, heading[2].trim().replace(/\s#+$/, ''));
    if (RULE.test(line) && !isBegun) return this.put('hr', '');
    if (this.depth >= DEEPEST) return false;
    const quote = QUOTE.exec(line);
    return quote ? this.startQuote(quote[1]) : this.startItem(ITEM.exec(line));
  }

  put(tag, text) {
    const node = element(tag, { dir: 'auto' });
    inline(node, text);
    this.root.append(node);
    return this.become(null);
  }

  paragraphLine(line) {
    if (!this.open?.lines) {
      this.become({ node: element('p', { dir: 'auto' }), lines: [] });
      this.root.append(this.open.node);
    }
    this.open.lines.push(line.trim());
    this.open.isStale = true;
  }

  showParagraph(open, lines) {
    open.isStale = false;
    open.node.replaceChildren();
    inline(open.node, lines.join('\n'));
  }

  startCode(fence, language, indent) {
    const code = element('code');
    const tail = element('span');
    const figure = element('figure', { className: 'code' },
      element('figcaption', {}, language || 'text', button('Copy', null, { className: 'copy-code' })),
      element('pre', { tabIndex: 0, 'aria-label': 'Code' }, code, tail));
    this.root.append(figure);
    return this.become({ code, tail, fence, indent, tokens: tokensOf(language), until: null });
  }

  codeLine(line) {
    const { open } = this;
    const trimmed = line.trim();
    if (trimmed.startsWith(open.fence) && !trimmed.replaceAll(open.fence[0], '')) {
      this.become(null);
      return;
    }
    open.until = highlight(open.code, line.slice(Math.min(indentOf(line), open.indent)), open.tokens, open.until);
    open.code.append('\n');
  }

  startQuote(line) {
    const node = element('blockquote');
    this.root.append(node);
    this.become({ quote: true, inner: new MarkdownView(node, this.depth + 1) });
    if (line) this.open.inner.line(line);
    return true;
  }

  startItem([, indent, marker, space, text]) {
    const tag = /\d/.test(marker) ? 'ol' : 'ul';
    const last = this.root.lastElementChild;
    const follows = this.open?.inner && !this.open.quote && last?.tagName.toLowerCase() === tag;
    const list = follows ? last : element(tag, tag === 'ol' ? { start: parseInt(marker, 10) } : {});
    const node = element('li', { dir: 'auto' });
    list.append(node);
    this.root.append(list);
    const content = indent.length + marker.length + Math.min(4, Math.max(1, space.length));
    this.become({ indent: indent.length, content, isLoose: false, inner: new MarkdownView(node, this.depth + 1) });
    if (text) this.open.inner.line(text);
    return true;
  }

  /** Make the last line of the open paragraph the head of a table. */
  startTable(line) {
    const { open } = this;
    const head = open.lines.at(-1);
    const aligns = cellsOf(line).map((cell) => (cell.endsWith(':') ? (cell.startsWith(':') ? 'center' : 'end') : ''));
    if (!head.includes('|') || cellsOf(head).length !== aligns.length) return false;
    open.lines.pop();
    if (open.lines.length) this.showParagraph(open, open.lines);
    else open.node.remove();
    const node = element('table');
    this.root.append(element('div', { className: 'table', tabIndex: 0 }, node));
    this.become({ node, aligns });
    return this.tableRow(this.open, head, 'th');
  }

  tableRow({ node, aligns }, line, tag) {
    const texts = cellsOf(line);
    const row = element('tr');
    aligns.forEach((align, index) => {
      const cell = element(tag, { className: align, dir: 'auto' });
      inline(cell, (texts[index] ?? '').replaceAll('\\|', '|'));
      row.append(cell);
    });
    node.append(row);
    return true;
  }
}
