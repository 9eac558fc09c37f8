// Messages on the page.
'use strict';

/** Shows one turn, and what is added to it. */
class TurnView {
  constructor(app, turn, index) {
    Object.assign(this, { app, turn, index });
    const isUser = turn.role === 'user';
    this.body = element('div', { className: isUser ? 'body' : 'body markdown', dir: 'auto' });
    this.note = element('p', { className: 'note', hidden: true });
    this.footer = element('footer');
    this.node = element('article', { className: `turn ${turn.role}`, 'aria-label': isUser ? 'You' : 'Reply' },
      this.body, this.note, this.footer);
    this.markdown = isUser ? null : new MarkdownView(this.body);
    this.numShown = 0;
    this.numReasoning = 0;
    if (isUser) this.body.append(turn.content);
    this.update(app.replyOf(turn));
  }

  /** Show what came since the last call. reply: what writes this turn now, if it is being written. */
  update(reply) {
    const { turn } = this;
    if (turn.reasoning?.length > this.numReasoning) this.addReasoning();
    if (this.markdown && turn.content.length > this.numShown) this.markdown.feed(turn.content.slice(this.numShown));
    this.numShown = turn.content.length;
    if (!reply) this.finish();
    else if (this.live) this.live.textContent = reply.words;
    else {
      this.live = element('span', { className: 'small', textContent: reply.words });
      this.footer.replaceChildren(element('b', { className: 'writing' }), this.live);
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

  finish() {
    const { app, turn, index } = this;
    this.markdown?.end();
    const words = turn.role === 'user' ? null : describeEnd(turn, app.contextLength());
    const lines = [...(words ? [words] : []), ...(turn.notices ?? [])];
    this.note.textContent = lines.join('\n');
    this.note.hidden = !lines.length;
    this.note.classList.toggle('fault', Boolean(turn.error));
    if (turn.error) this.note.setAttribute('role', 'alert');
    const copy = button('Copy', (event) => app.copy(turn.content, event.target));
    const isLast = app.current.turns.at(-1) === turn;
    if (turn.role === 'user') this.footer.replaceChildren(button('Edit', () => this.edit()), copy);
    else {
      const continued = isLast && canContinue(turn, app.contextLength());
      this.footer.replaceChildren(copy, ...(isLast ? [button('Regenerate', () => app.regenerate())] : []),
        ...(continued ? [button('Continue', () => app.continueReply(), { className: 'continue' })] : []));
    }
    if (turn.stats) this.footer.append(element('span', { className: 'stats', textContent: describeStats(turn.stats) }));
    this.edit = () => this.showEditor(index);
  }

  /** Let the user change the message; what came after it is answered anew. */
  showEditor(index) {
    const field = element('textarea', { value: this.turn.content, rows: 3, dir: 'auto', 'aria-label': 'Edit message' });
    const leave = () => {
      form.replaceWith(this.body);
      this.footer.hidden = false;
      byId('message').focus();
    };
    const send = () => field.value.trim() && this.app.edit(index, field.value.trim());
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
    this.body.replaceWith(form);
    this.footer.hidden = true;
    grow(field);
    field.addEventListener('input', () => grow(field));
    field.focus();
  }
}

/** Make a field as high as its text. */
function grow(field) {
  field.style.height = 'auto';
  field.style.height = `${field.scrollHeight}px`;
}
