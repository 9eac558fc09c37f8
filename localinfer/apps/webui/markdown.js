// Markdown in blocks, as it comes: what a finished line became stays, only the last line is shown anew, and of a
// paragraph what is not settled.
'use strict';

const LONGEST = 2000;     // Characters of a line that may be more than text; the rest of a longer one is text.
const LINES_A_PART = 40;  // Of code: a browser lays out the part to which it adds.
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
    this.flow = null;   // What takes the rest of a line that is too long to be more than text.
    this.numBegun = 0;  // Characters of the unfinished line that have begun an item or a quotation.
  }

  /** Take more text. */
  feed(text) {
    const rest = this.flow ? this.flowOn(text) : text;
    const lines = (this.rest + rest).split('\n');
    this.rest = lines.pop();
    for (const line of lines) this.wholeLine(line);
    if (this.rest.length > LONGEST) {
      this.flow = this.begin(this.rest);
      this.rest = '';
    }
    if (!this.flow) this.tail(this.rest);
    this.settle();
  }

  /** The text has ended. */
  end() {
    if (this.rest) this.wholeLine(this.rest);
    this.rest = '';
    this.flow?.endLine();
    this.flow = null;
    this.become(null);
  }

  /** Add text to a long line; gives what follows that line. */
  flowOn(text) {
    const end = text.indexOf('\n');
    this.flow.add(end < 0 ? text : text.slice(0, end));
    if (end < 0) return '';
    this.flow.endLine();
    this.flow = null;
    return text.slice(end + 1);
  }

  wholeLine(text) {
    if (text.length > LONGEST) this.begin(text).endLine();
    else this.line(text);
  }

  /** Take the beginning of a line that is too long to be more than text; gives what takes the rest of it. */
  begin(text) {
    this.line(text.slice(0, LONGEST), true);
    const flow = this.leaf() ?? this.paragraphLine('', true);
    flow.add(text.slice(LONGEST));
    return flow;
  }

  /** What of the open blocks takes text. */
  leaf() {
    const { open } = this;
    if (open?.inner) return open.inner.leaf() ?? open.inner.paragraphLine('', true);
    if (!open?.code) return open?.paragraph ?? null;
    return { add: (text) => open.part.append(text), endLine: () => open.part.append('\n') };
  }

  /** Take a finished line, or the first part of a long one. */
  line(text, isCut = false) {
    this.dropTail();
    const line = untabbed(text.replace(/\r$/, ''));
    if (this.open?.code) return this.codeLine(line, isCut);
    const begun = this.numBegun;
    this.numBegun = 0;
    if (begun) return this.open.inner.line(line.slice(begun), isCut);
    const inside = this.inside(line, isCut);
    if (inside !== null) return this.open.inner.line(inside, isCut);
    if (!line.trim()) return this.become(null);
    return this.startBlock(line, { isCut }) || this.paragraphLine(line, isCut);
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
    else if (this.open?.paragraph && !this.isBlockStart(text)) this.paragraphTail(text.trim());
    else if (this.depth < DEEPEST && (QUOTE.test(text) || ITEM.test(text)) && this.isBlockStart(text)) {
      const rest = QUOTE.exec(text)?.[1] ?? ITEM.exec(text)[4];
      this.startBlock(text.slice(0, text.length - rest.length), { isBegun: true });
      this.numBegun = text.length - rest.length;
      this.innerTail(rest);
    } else if (!this.open?.aligns || !text.includes('|')) {
      const node = element('div', { className: 'tail' });
      this.root.append(node);
      const view = new MarkdownView(node, this.depth);
      view.line(FENCE.test(text) ? text : likely(text));
      view.become(null);
      this.undoTail = () => node.remove();
    }
  }

  paragraphTail(text) {
    const { paragraph } = this.open;
    paragraph.show(text);
    this.undoTail = () => { paragraph.isStale = true; };
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
    if (this.open?.paragraph?.isStale) this.open.paragraph.show();
    this.open?.inner?.settle();
  }

  /** Close the open block, and open another. */
  become(open) {
    this.open?.paragraph?.end();
    this.open?.inner?.become(null);
    this.open = open;
    return true;
  }

  /** What a line adds to the open item or quotation; null if it is not part of it. */
  inside(line, isCut = false) {
    const { open } = this;
    if (!open?.inner) return null;
    if (open.quote) return QUOTE.exec(line)?.[1] ?? null;
    if (!line.trim()) {
      open.isLoose = true;
      return '';
    }
    const indent = indentOf(line);
    if (indent >= open.indent + 2) return line.slice(Math.min(indent, open.content));
    const isLazy = !open.isLoose && !this.isBlockStart(line, isCut) && open.inner.open?.paragraph;
    return isLazy ? line.trim() : null;
  }

  isBlockStart(line, isCut = false) {
    const item = ITEM.exec(line);
    return (!isCut && (FENCE.test(line) || HEADING.test(line) || RULE.test(line))) || QUOTE.test(line) || (item !== null
      && item[4] !== '' && (!/\d/.test(item[2]) || !this.open?.paragraph || parseInt(item[2], 10) === 1));
  }

  /** Begin a block with a line, or add a row to a table; false if the line is just text. */
  startBlock(line, { isBegun = false, isCut = false } = {}) {
    const isWhole = !isBegun && !isCut;
    if (isWhole && this.open?.aligns && line.includes('|')) return this.tableRow(this.open, line, 'td');
    if (isWhole && this.open?.paragraph && DELIMITERS.test(line.trim()) && this.startTable(line)) return true;
    if (!isBegun && !this.isBlockStart(line, isCut)) return false;
    if (isWhole) {
      const fence = FENCE.exec(line);
      if (fence) return this.startCode(fence[1], fence[2].trim().split(/\s/)[0], indentOf(line));
      const heading = HEADING.exec(line);
      if (heading) return this.put(`h${Math.min(6, heading[1].length + 1)}`, heading[2].trim().replace(/\s#+$/, ''));
      if (RULE.test(line)) return this.put('hr', '');
    }
    if (this.depth >= DEEPEST) return false;
    const quote = QUOTE.exec(line);
    return quote ? this.startQuote(quote[1], isCut) : this.startItem(ITEM.exec(line), isCut);
  }

  put(tag, text) {
    const node = element(tag, { dir: 'auto' });
    inline(node, text);
    this.root.append(node);
    return this.become(null);
  }

  paragraphLine(line, isCut) {
    if (!this.open?.paragraph) {
      this.become({ paragraph: new Paragraph() });
      this.root.append(this.open.paragraph.node);
    }
    this.open.paragraph.line(isCut ? line.trimStart() : line.trim(), isCut);
    return this.open.paragraph;
  }

  startCode(fence, language, indent) {
    const code = element('code');
    const tail = element('span');
    const figure = element('figure', { className: 'code' },
      element('figcaption', {}, language || 'text', button('Copy', null, { className: 'copy-code' })),
      element('pre', { tabIndex: 0, 'aria-label': 'Code' }, code, tail));
    this.root.append(figure);
    return this.become({ code, part: code, numLines: 0, tail, fence, indent, tokens: tokensOf(language), until: null });
  }

  codeLine(line, isCut) {
    const { open } = this;
    if (open.numLines && open.numLines % LINES_A_PART === 0) {
      open.part = element('span', { className: 'part' });
      open.code.append(open.part);
    }
    const trimmed = line.trim();
    if (!isCut && trimmed.startsWith(open.fence) && !trimmed.replaceAll(open.fence[0], '')) {
      this.become(null);
      return;
    }
    open.until = highlight(open.part, line.slice(Math.min(indentOf(line), open.indent)), open.tokens, open.until);
    if (!isCut) open.part.append('\n');
    open.numLines += 1;
  }

  startQuote(line, isCut) {
    const node = element('blockquote');
    this.root.append(node);
    this.become({ quote: true, inner: new MarkdownView(node, this.depth + 1) });
    if (line) this.open.inner.line(line, isCut);
    return true;
  }

  startItem([, indent, marker, space, text], isCut) {
    const tag = /\d/.test(marker) ? 'ol' : 'ul';
    const last = this.root.lastElementChild;
    const follows = this.open?.inner && !this.open.quote && last?.tagName.toLowerCase() === tag;
    const list = follows ? last : element(tag, tag === 'ol' ? { start: parseInt(marker, 10) } : {});
    const node = element('li', { dir: 'auto' });
    list.append(node);
    this.root.append(list);
    const content = indent.length + marker.length + Math.min(4, Math.max(1, space.length));
    this.become({ indent: indent.length, content, isLoose: false, inner: new MarkdownView(node, this.depth + 1) });
    if (text) this.open.inner.line(text, isCut);
    return true;
  }

  /** Make the last line of the open paragraph the head of a table. */
  startTable(line) {
    const { paragraph } = this.open;
    const head = paragraph.held?.trim();
    const aligns = cellsOf(line).map((cell) => (cell.endsWith(':') ? (cell.startsWith(':') ? 'center' : 'end') : ''));
    if (!head || cellsOf(head).length !== aligns.length) return false;
    if (!paragraph.withoutHead()) paragraph.node.remove();
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
