// Runs scripts of the chat page in Node on a stand-in of the few parts of a document that they need.
// Arguments: the scripts, in order. Each line of standard input: a list of calls, as JSON, for a page of their own; of
// standard output: what they give.
'use strict';

const fs = require('node:fs');
const readline = require('node:readline');
const vm = require('node:vm');

class Node {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, parent: null });
    for (const name of ['className', 'href', 'title', 'target', 'rel', 'referrerPolicy', 'dir']) this[name] = '';
    Object.assign(this, { tabIndex: -1, onclick: null, start: 1, type: '' });
  }

  get tagName() { return this.tag.toUpperCase(); }
  get lastElementChild() { return this.children.findLast((child) => child instanceof Node) ?? null; }
  get textContent() { return this.children.map((child) => child.textContent ?? child).join(''); }
  set textContent(text) { this.replaceChildren(text); }

  setAttribute(name, value) { this.attributes[name] = value; }

  append(...added) {
    for (const child of added) {
      if (child instanceof Node) {
        child.remove();
        child.parent = this;
      }
      this.children.push(child);
    }
  }

  remove() {
    if (this.parent) this.parent.children.splice(this.parent.children.lastIndexOf(this), 1);
    this.parent = null;
  }

  replaceChildren(...added) {
    for (const child of this.children) if (child instanceof Node) child.parent = null;
    this.children = [];
    this.append(...added.filter((child) => child !== ''));
  }

  /** As markup, with what decides how it looks and where it leads. */
  get markup() {
    const kept = { class: this.className, href: this.href, start: this.tag === 'ol' && this.start !== 1 ? this.start : '' };
    const shown = Object.entries(kept).filter(([, value]) => value).map(([name, value]) => ` ${name}=${value}`).join('');
    const inside = [];
    for (const child of this.children) {
      if (child instanceof Node) inside.push(child.markup);
      else if (typeof inside.at(-1) === 'string' && !inside.at(-1).endsWith('>')) inside.push(inside.pop() + child);
      else inside.push(String(child));
    }
    // What is shown until it is settled looks as if it were.
    if (this.tag === 'span' && this.className === 'tail') return inside.join('');
    return this.className === 'copy-code' ? '' : `<${this.tag}${shown}>${inside.join('')}</${this.tag}>`;
  }
}

/** Counts, in a context, the characters that functions of texts and expressions look at, and what is put into elements.
 *  Expressions that must match where they begin count when they do. */
const COUNTING = `
  let counted = 0;
  const step = (number) => { counted += Math.max(1, number); };
  for (const name of ['indexOf', 'includes']) {
    const original = String.prototype[name];
    String.prototype[name] = function (sought, from = 0) {
      const found = original.call(this, sought, from);
      step(found === true || found === -1 || found === false ? this.length - from : found - from + sought.length);
      return found;
    };
  }
  for (const name of ['replaceAll', 'split']) {
    const original = String.prototype[name];
    String.prototype[name] = function (...given) {
      step(this.length);
      return original.apply(this, given);
    };
  }
  const exec = RegExp.prototype.exec;
  RegExp.prototype.exec = function (text) {
    const from = this.global || this.sticky ? this.lastIndex : 0;
    const found = exec.call(this, text);
    const isHeld = this.sticky || this.source.startsWith('^');
    step(found ? found.index + found[0].length - from : isHeld ? 1 : text.length - from);
    return found;
  };
  const append = Node.prototype.append;
  Node.prototype.append = function (...added) {
    step(added.length);
    append.apply(this, added);
  };
`;

const CALLED = `
  /** Markdown as markup, fed in pieces; root: what holds it. */
  function render(pieces, root = document.createElement('div')) {
    const view = new MarkdownView(root);
    for (const piece of pieces) view.feed(piece);
    const unfinished = root.markup;
    view.end();
    return { unfinished, whole: root.markup };
  }
  /** Characters that are looked at and elements that are moved while Markdown comes in pieces; work: [text, size]. */
  function steps(text, size) {
    counted = 0;
    const root = document.createElement('div');
    const view = new MarkdownView(root);
    for (let at = 0; at < text.length; at += size) view.feed(text.slice(at, at + size));
    view.end();
    return counted;
  }
  function events(pieces) {
    const reader = new EventReader();
    return pieces.flatMap((piece) => reader.feed(piece));
  }
  /** What is shown of messages that came in an order, and what stands beside one of them. */
  function tree(record, messages, beside) {
    const conversation = new Conversation(record);
    for (const message of messages) conversation.put(message);
    const one = conversation.messages.get(beside);
    return { turns: conversation.turns.map(({ id }) => id), contents: conversation.turns.map(({ content }) => content),
      versions: conversation.versions(one).map(({ id }) => id), end: conversation.endBehind(one).id };
  }
  function exported(record, messages) {
    return toJson(new Conversation(record, messages));
  }
  function brought(text, isHere) {
    const found = imported(text, () => isHere);
    if (!found) return null;
    const { turns, messages, id, name, options } = new Conversation(found.record, found.messages);
    return { id, name, options, contents: turns.map(({ content }) => content), ids: [...messages.keys()],
      all: [...messages.values()].map(({ content }) => content).sort() };
  }
  function failure(error, status) {
    const { message, mayTryAgain } = failureOf(error, status);
    return [message, mayTryAgain];
  }
  function chord({ graph = false, apple = false, ...event }, tag) {
    const target = { tagName: tag, type: 'text' };
    return chordOf({ ...event, target, getModifierState: () => graph }, apple);
  }
  /** What is read of kept texts, and what is left of them. */
  function settings(kept) {
    const texts = new Map(Object.entries(kept));
    globalThis.localStorage = { getItem: (key) => texts.get(key) ?? null, removeItem: (key) => texts.delete(key) };
    return [ofBrowser.read('localinfer.options', checkedOptions), texts.get('localinfer.options') ?? null];
  }
  function refusing(text) {
    Object.defineProperty(globalThis, 'sessionStorage', { get() { throw new Error('SecurityError'); } });
    const isKept = ofTab.set('a', text);
    const found = ofTab.get('a');
    ofTab.remove('a');
    return [found, isKept, ofTab.get('a')];
  }
`;

const scripts = [
  new vm.Script(COUNTING),
  ...process.argv.slice(2).map((path) => new vm.Script(fs.readFileSync(path, 'utf8'), { filename: path })),
  new vm.Script(CALLED),
];
const { append } = Node.prototype;
readline.createInterface({ input: process.stdin }).on('line', (line) => {
  Node.prototype.append = append;
  const context = vm.createContext({
    document: { createElement: (tag) => new Node(tag) }, URL, Node, structuredClone, crypto,
  });
  for (const script of scripts) script.runInContext(context);
  const results = JSON.parse(line).map(([name, ...given]) => {
    context.given = given;
    return vm.runInContext(`${name}(...given)`, context);
  });
  process.stdout.write(`${JSON.stringify(results)}\n`);
});
