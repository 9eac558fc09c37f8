// Messages on the page.
'use strict';

/** Shows one turn, and what is added to it. */
class TurnView {
  /** isLater: Markdown is shown as it was written until `format` is called. */
  constructor(app, turn, isLater = false) {
    Object.assign(this, { app, turn });
    const isUser = turn.role === 'user';
    this.body = element('div', { className: isUser ? 'body' : 'body markdown', dir: 'auto' });
    this.note = element('p', { className: 'note', hidden: true });
    this.footer = element('footer');
    this.node = element('article', { className: `turn ${turn.role}`, 'aria-label': isUser ? 'You' : 'Reply' },
      this.body, this.note, this.footer);
    this.markdown = null;
    this.numShown = 0;
    this.numReasoning = 0;
    this.state = null;
    this.editor = null;
    if (turn.media?.length) this.body.append(element('p', { className: 'media' }, ...turn.media.map(thumbnail)));
    if (isUser || isLater) this.body.append(turn.content);
    this.isRaw = !isUser && isLater;
    if (this.isRaw) this.body.classList.add('raw');
    this.update();
  }

  /** Show the Markdown of a turn that was shown as it was written. */
  format() {
    if (!this.isRaw) return;
    this.isRaw = false;
    this.body.classList.remove('raw');
    this.feed();
    if (!this.app.writerOf(this.turn)) this.end();
  }

  end() {
    this.markdown?.end();
    this.markdown = null;
  }

  feed() {
    const { turn } = this;
    if (turn.role === 'user' || this.isRaw || turn.content.length <= this.numShown) return;
    if (!this.markdown) {
      // What an ended text became is no beginning of more.
      this.body.replaceChildren();
      this.markdown = new MarkdownView(this.body);
      this.numShown = 0;
    }
    this.markdown.feed(turn.content.slice(this.numShown));
    this.numShown = turn.content.length;
  }

  /** Show what came since the last call, and what can be done with the turn now. */
  update() {
    const { turn, app } = this;
    const writer = app.writerOf(turn);
    if (writer) this.format();
    if (turn.reasoning?.length > this.numReasoning) this.addReasoning();
    this.feed();
    if (writer) this.showWriter(writer.words);
    else this.finish();
  }

  showWriter(words) {
    this.state = null;
    this.version = this.turn.version;
    if (this.live) this.live.textContent = words;
    else {
      this.live = element('span', { className: 'small', textContent: words });
      this.footer.replaceChildren(element('b', { className: 'writing' }), this.live);
      this.note.hidden = true;
    }
  }

  addReasoning() {
    const { reasoning } = this.turn;
    if (!this.thoughts) {
      this.thoughts = element('div', { dir: 'auto' });
      this.summary = element('summary');
      this.node.prepend(element('details', { className: 'reasoning' }, this.summary, this.thoughts));
    }
    this.thoughts.append(reasoning.slice(this.numReasoning));
    this.numReasoning = reasoning.length;
    this.summary.textContent = `Reasoning \u00b7 ${grouped(reasoning.length)} characters`;
  }

  /** Show the notes and the controls of a turn that nobody writes, unless they are as they were. */
  finish() {
    const { app, turn } = this;
    this.live = null;
    const isLast = app.current.turns.at(-1) === turn;
    const isBusy = app.isWritten(app.current);
    const versions = app.current.versions(turn);
    const context = app.contextLength();
    this.version = turn.version;
    const state = [turn.version, turn.finish_reason, isLast, isBusy, versions.length, versions.indexOf(turn), context].join();
    if (state === this.state) return;
    this.state = state;
    this.end();
    this.showNotes(context);
    const copy = button('Copy', (event) => app.copy(turn.content, event.target));
    const controls = turn.role === 'user' ? [...(turn.is_summary ? [] : [button('Edit', () => this.edit())]), copy] : [copy];
    if (turn.role !== 'user' && isLast && !isBusy) {
      controls.push(button('Regenerate', () => app.regenerate()));
      if (canContinue(turn, context)) {
        controls.push(button('Continue', () => app.continueReply(), { className: 'continue' }));
      }
      if (isFull(turn, context)) controls.push(button('Make room', () => app.openRoom(), { className: 'continue' }));
    }
    this.footer.replaceChildren(...controls, ...this.versionControls(versions));
    if (turn.stats) this.footer.append(element('span', { className: 'stats', textContent: describeStats(turn.stats) }));
  }

  showNotes(context) {
    const { turn } = this;
    const words = turn.role === 'user' ? null : describeEnd(turn, context);
    const lines = [...(words ? [words] : []), ...(turn.notices ?? [])];
    this.note.textContent = lines.join('\n');
    this.note.hidden = !lines.length;
    this.note.classList.toggle('fault', Boolean(turn.error));
    if (turn.error) this.note.setAttribute('role', 'alert');
    else this.note.removeAttribute('role');
  }

  /** Ways to the turns that stand in the place of this one. */
  versionControls(versions) {
    if (versions.length < 2) return [];
    const at = versions.indexOf(this.turn);
    const to = (index, label, sign) => button(sign, () => this.app.choose(versions[index]),
      { 'aria-label': label, title: label, disabled: !versions[index] });
    return [element('span', { className: 'versions' }, to(at - 1, 'Version before', '\u2039'), `${at + 1}/${versions.length}`,
      to(at + 1, 'Version after', '\u203a'))];
  }

  edit() {
    if (!this.editor) this.showEditor();
  }

  /** Let the user change the message; the former one, and what came after it, stay beside it. */
  showEditor() {
    const field = element('textarea', { value: this.turn.content, rows: 3, dir: 'auto', 'aria-label': 'Edit message' });
    const leave = () => {
      form.replaceWith(this.body);
      this.editor = null;
      this.footer.hidden = false;
      byId('message').focus();
      this.app.afterEdit();
    };
    const send = async () => {
      const text = field.value.trim();
      if (text && await this.app.edit(this.turn, text)) leave();
    };
    const form = element('form', { className: 'edit', onsubmit: (event) => { event.preventDefault(); send(); } }, field,
      element('p', { className: 'buttons' }, element('button', { className: 'main', textContent: 'Send' }), ' ',
        button('Cancel', leave)));
    form.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        leave();
      } else if (sends(event)) {
        event.preventDefault();
        send();
      }
    });
    this.editor = field;
    this.body.replaceWith(form);
    this.footer.hidden = true;
    grow(field);
    field.addEventListener('input', () => grow(field));
    field.focus();
  }
}

/** Whether a reply ended, or failed, for want of room in the context. */
function isFull({ finish_reason: reason, stats, too_long: tooLong }, contextLength) {
  const isCut = reason === 'length' && stats && contextLength
    && stats.prompt_tokens + stats.completion_tokens >= contextLength;
  return Boolean(tooLong || isCut);
}

/** Make a field as high as its text. */
function grow(field) {
  field.style.height = 'auto';
  field.style.height = `${field.scrollHeight}px`;
}
