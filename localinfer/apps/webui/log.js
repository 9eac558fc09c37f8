// The messages of a conversation, as far as they are shown already.
'use strict';

const NEAR_END = 48;
const FIRST_FORMATTED = 20;
const NUM_RECENT = 4;     // Messages at the end that are laid out even if they are out of sight.
const SLICE_MILLISECONDS = 12;
const SHARE_OF_TIME = 3;  // Showing what comes may take one of so many parts of the time.

/** Keeps the views of the messages that stay, adds those that come, and has the end in sight. */
class MessageLog {
  constructor(app) {
    this.app = app;
    this.node = byId('log');
    this.views = [];
    this.raw = [];
    this.shown = null;
    this.isAtEnd = true;
    this.isDue = false;
    this.freeAt = 0;
    this.welcome = element('div', { className: 'welcome' }, element('h2', {}, 'What do you want to know?'),
      element('p', {}, 'What you write goes to this server alone, and is kept in this browser.'));
  }

  connect() {
    const { node, app } = this;
    node.onscroll = () => { this.isAtEnd = node.scrollHeight - node.scrollTop - node.clientHeight < NEAR_END; };
    // What is said below takes height from it.
    new ResizeObserver(() => this.scroll()).observe(node);
    node.onclick = (event) => {
      if (event.target.className === 'copy-code') app.copyCode(event.target.closest('figure'), event.target);
    };
  }

  /** Show the messages of the current conversation: those that are shown already stay. */
  show() {
    const { app, views } = this;
    const { turns } = app.current;
    if (this.shown !== app.current) {
      this.shown = app.current;
      this.raw.length = 0;
      for (const view of views.splice(0)) view.node.remove();
    }
    let kept = 0;
    while (kept < views.length && views[kept].turn === turns[kept]) kept += 1;
    for (const view of views.splice(kept)) view.node.remove();
    if (turns.length) this.welcome.remove();
    else this.node.append(this.welcome);
    const formatted = turns.length - FIRST_FORMATTED;
    const added = turns.slice(kept).map((turn, index) => new TurnView(app, turn, kept + index < formatted));
    this.node.append(...added.map((view) => view.node));
    views.push(...added);
    this.raw.push(...added.filter((view) => view.isRaw));
    if (this.raw.length) this.formatSoon();
    // Of the others only the last ones that stayed have other controls now.
    for (const view of views.slice(Math.max(0, kept - 2), kept)) view.update();
    const past = views.length - NUM_RECENT;
    for (let index = Math.max(0, Math.min(kept, past) - NUM_RECENT); index < views.length; index += 1) {
      views[index].node.classList.toggle('past', index < past);
    }
    this.markRead();
    this.scroll();
  }

  /** Show newer states of messages that are shown. */
  refresh() {
    this.views.forEach((view, index) => {
      if (view.version !== view.turn.version || index >= this.views.length - 2) view.update();
    });
    this.scroll();
  }

  /** Show what changed for all messages. */
  update() {
    for (const view of this.views) view.update();
    this.scroll();
  }

  /** Format long conversations from their end, a little at a time. */
  formatSoon() {
    if (this.isFormatting) return;
    this.isFormatting = true;
    const slice = () => {
      const end = performance.now() + SLICE_MILLISECONDS;
      while (this.raw.length && performance.now() < end) this.raw.pop().format();
      this.isFormatting = this.raw.length > 0;
      if (this.isFormatting) setTimeout(slice, SLICE_MILLISECONDS);
    };
    setTimeout(slice);
  }

  /** Mark where the model begins to read, if older messages are left out. */
  markRead() {
    const [first] = turnsRead(this.app.current);
    const begins = first && first !== this.app.current.turns[0] ? this.viewOf(first) : null;
    if (this.begins !== begins) {
      this.begins?.node.classList.remove('begins');
      begins?.node.classList.add('begins');
      this.begins = begins;
    }
  }

  viewOf(turn) {
    return this.views.findLast((view) => view.turn === turn) ?? null;
  }

  /** Show what came of a turn that is being written: once in the next frame, and seldom enough to leave time. */
  touch() {
    if (this.isDue) return;
    this.isDue = true;
    const act = () => requestAnimationFrame((began) => {
      this.isDue = false;
      for (const view of this.views.slice(-2)) view.update();
      this.scroll();
      // Layout comes behind this, and counts.
      setTimeout(() => {
        const now = performance.now();
        this.freeAt = now + Math.min(500, SHARE_OF_TIME * Math.max(0, now - began - 16));
      });
    });
    const wait = this.freeAt - performance.now();
    if (wait > 0) setTimeout(act, wait);
    else act();
  }

  /** Keep the end in sight, unless the user went up to read. */
  scroll() {
    if (this.isAtEnd) this.node.scrollTop = this.node.scrollHeight;
  }

  /** The message that is being edited; null if none is. */
  get edited() {
    return this.views.find((view) => view.editor)?.turn ?? null;
  }
}
