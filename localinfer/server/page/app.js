// The page: what is shown, and what its controls do.
'use strict';

const WAITS = 'A reply is being written; your message waits here.';
const NEAR_END = 48;

class App {
  constructor(store) {
    this.store = store;
    this.server = new Server((wasWrong) => this.ask(
      `${wasWrong ? 'That token was not accepted. ' : ''}The token of this server:`, '', 'password'));
    this.models = [];
    this.conversations = [];
    this.current = null;
    this.replies = new Map();
    this.views = [];
    this.frame = 0;
    this.isAtEnd = true;
    this.firstOptions = ofBrowser.read('localinfer.options', checkedOptions) ?? { model: '', system: '', options: {} };
    this.channel = globalThis.BroadcastChannel ? new BroadcastChannel('localinfer') : null;
  }

  async start() {
    this.conversations = await this.store.list();
    const id = ofTab.get('localinfer.current');
    this.connect();
    this.show(this.conversations.find((one) => one.id === id) ?? this.fresh());
    byId('message').value = ofTab.get('localinfer.draft') ?? '';
    grow(byId('message'));
    byId('message').focus();
    if (!this.store.database) this.notice('This browser keeps nothing here: conversations end with the page.');
    else if (ofBrowser.broken.size) this.notice('The options that this browser kept could not be read: defaults hold.');
    await this.findModels();
  }

  /** Ask the server which models it has. */
  async findModels() {
    try {
      this.models = await this.server.models();
    } catch (error) {
      this.notice(error.message, 'Try again', () => this.findModels());
      return;
    }
    const wanted = this.current.model;
    if (!this.models.some((model) => model.id === wanted)) {
      this.current.model = this.models[0]?.id ?? '';
      if (wanted && this.current.turns.length) this.notice(`${wanted} is not served here; another model will answer.`);
    }
    if (!this.models.length) this.notice('No model that can chat is served here. Start the server with -m MODEL.');
    byId('model').replaceChildren(...this.models.map(({ id }) => element('option', { value: id, textContent: id })));
    this.showFrame();
  }

  // What is shown.

  show(conversation) {
    this.current = conversation;
    ofTab.set('localinfer.current', conversation.id);
    this.isAtEnd = true;
    this.showTurns();
    this.showFrame();
    this.openSidebar(false);
  }

  showTurns() {
    this.views = this.current.turns.map((turn, index) => new TurnView(this, turn, index));
    const welcome = element('div', { className: 'welcome' }, element('h2', {}, 'What do you want to know?'),
      element('p', {}, 'What you write goes to this server alone, and is kept in this browser.'));
    byId('log').replaceChildren(...(this.views.length ? this.views.map((view) => view.node) : [welcome]));
    this.scroll();
  }

  /** Everything around the messages. */
  showFrame() {
    const { current } = this;
    const isRunning = this.replies.has(current.id);
    byId('title').textContent = current.name || 'New conversation';
    document.title = current.name ? `${current.name} - localinfer` : 'localinfer';
    byId('model').value = current.model;
    byId('actions').hidden = !current.turns.length;
    byId('send').textContent = isRunning ? 'Stop' : 'Send';
    byId('log').setAttribute('aria-busy', String(isRunning));
    byId('conversations').replaceChildren(...this.conversations.map((one) => element('li', {},
      button(one.name, () => { this.show(one); byId('message').focus(); },
        { title: one.name, ...(one === current ? { 'aria-current': 'true' } : {}) }))));
    this.showContext();
  }

  showContext() {
    const stats = this.current.turns.findLast((turn) => turn.stats)?.stats;
    const used = stats ? stats.prompt_tokens + stats.completion_tokens : 0;
    const most = this.contextLength();
    const words = `${grouped(used)} ${most ? `of ${grouped(most)} ` : ''}tokens of context`;
    const fullness = fullnessOf(used, most);
    byId('context-words').textContent = fullness ? `${words}: ${fullness}` : words;
    byId('context').classList.toggle('full', Boolean(fullness));
    byId('context').setAttribute('aria-valuenow', String(used));
    byId('context').setAttribute('aria-valuemax', String(most ?? used));
    byId('context').setAttribute('aria-valuetext', words);
    byId('gauge').firstChild.style.width = `${most ? Math.min(100, 100 * used / most) : 0}%`;
  }

  model() {
    return this.models.find((model) => model.id === this.current.model);
  }

  contextLength() {
    return this.model()?.context_length ?? null;
  }

  replyOf(turn) {
    const reply = this.replies.get(this.current.id);
    return reply?.turn === turn ? reply : null;
  }

  /** Show what came, once in the next frame. */
  touch() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      const view = this.views.at(-1);
      view?.update(this.replyOf(view.turn));
      this.scroll();
    });
  }

  /** Keep the end in sight, unless the user went up to read. */
  scroll() {
    const log = byId('log');
    if (this.isAtEnd) log.scrollTop = log.scrollHeight;
  }

  /** Say something above the message, with something to do about it. */
  notice(words, label = 'Close', action = () => {}) {
    const [text, act] = byId('notice').children;
    text.textContent = words;
    act.textContent = label;
    act.onclick = () => {
      byId('notice').hidden = true;
      byId('message').focus();
      action();
    };
    byId('notice').hidden = false;
    this.say(words);
  }

  /** Tell those who hear the page. */
  say(words) {
    byId('status').textContent = words;
  }

  // What the user does with messages.

  fresh() {
    const { model, ...options } = this.firstOptions;
    const isServed = !this.models.length || this.models.some(({ id }) => id === model);
    return newConversation((isServed ? model : this.models[0].id) ?? '', options);
  }

  send(text) {
    const { current } = this;
    current.turns.push({ role: 'user', content: text });
    current.name ||= text.trim().split('\n')[0].slice(0, 60);
    byId('notice').hidden = true;
    this.answer();
  }

  /** Have the conversation's last message answered. */
  async answer() {
    const turn = { role: 'assistant', content: '', reasoning: '' };
    this.current.turns.push(turn);
    await this.fill(turn, false);
  }

  /** Go on with the last reply, which was cut or stopped. */
  async continueReply() {
    const { current } = this;
    const turn = current.turns.at(-1);
    if (this.replies.has(current.id) || !turn || !canContinue(turn, this.contextLength())) return;
    Object.assign(turn, { finish_reason: null, notices: [], error: undefined, may_try_again: undefined });
    await this.fill(turn, true);
  }

  async fill(turn, continues) {
    const conversation = this.current;
    const reply = new Reply(this, conversation, turn, continues);
    this.replies.set(conversation.id, reply);
    this.conversations = [conversation, ...this.conversations.filter((one) => one !== conversation)];
    this.isAtEnd = true;
    this.showTurns();
    this.showFrame();
    // The button that was pressed may be gone.
    if (document.activeElement === document.body) byId('message').focus();
    this.say('Writing a reply.');
    await this.save(conversation);
    await reply.run();
    // Another has taken its place, or the conversation was deleted.
    if (this.replies.get(conversation.id) !== reply) return;
    this.replies.delete(conversation.id);
    // A reply also ends where the page goes away, and then nothing is saved any more.
    reply.keep();
    await this.save(conversation);
    this.store.forgetRunning(conversation.id);
    if (byId('notice').firstElementChild.textContent === WAITS) byId('notice').hidden = true;
    this.say(turn.error ?? `The reply is complete: ${grouped(turn.content.length)} characters.`);
    if (this.current === conversation) this.touch();
    // A model that had to be loaded may have less context than its file allows.
    if (this.model()?.state !== 'loaded') await this.findModels();
    this.showFrame();
  }

  regenerate() {
    const { current } = this;
    if (this.replies.has(current.id) || current.turns.at(-1)?.role !== 'assistant') return;
    this.replaceTurns(current.turns.slice(0, -1), 'The former reply is gone.');
  }

  edit(index, text) {
    const kept = this.current.turns.slice(0, index);
    this.replaceTurns([...kept, { role: 'user', content: text }], 'What came after the message is gone.');
  }

  /** Go on from other turns; the former ones can be had back. */
  replaceTurns(turns, words) {
    const { current } = this;
    const former = current.turns;
    this.drop(current);
    current.turns = turns;
    this.answer();
    this.notice(words, 'Undo', () => {
      this.drop(current);
      current.turns = former;
      this.save(current);
      this.show(current);
    });
  }

  stop() {
    this.replies.get(this.current.id)?.stop();
  }

  /** Stop a conversation's reply, which is not wanted any more. */
  drop({ id }) {
    this.replies.get(id)?.stop();
    this.replies.delete(id);
    this.store.forgetRunning(id);
  }

  // What the user does with conversations.

  async save(conversation) {
    conversation.changed = new Date().toISOString();
    try {
      await this.store.save(conversation);
      this.channel?.postMessage(conversation.id);
    } catch (error) {
      this.notice(`This conversation could not be kept (${error.message}). Delete old ones, or export it.`);
    }
  }

  async rename() {
    const { current } = this;
    const name = await this.ask('Name of this conversation:', current.name);
    if (!name) return;
    current.name = name;
    await this.save(current);
    this.showFrame();
  }

  async delete() {
    const { current } = this;
    this.drop(current);
    this.conversations = this.conversations.filter((one) => one !== current);
    await this.store.delete(current.id);
    this.channel?.postMessage(current.id);
    this.show(this.fresh());
    this.notice(`${current.name} was deleted.`, 'Undo', async () => {
      this.conversations.unshift(current);
      await this.save(current);
      this.show(current);
    });
  }

  export(text, type, ending) {
    const href = URL.createObjectURL(new Blob([text], { type }));
    const name = this.current.name.replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '') || 'conversation';
    element('a', { href, download: `${name}.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 60_000);
  }

  /** Put text on the clipboard; pages without TLS that are not of this machine have no other way than the second. */
  async copy(text, control = null) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const field = element('textarea', { value: text, className: 'unseen' });
      document.body.append(field);
      field.select();
      document.execCommand('copy');
      field.remove();
    }
    this.say('Copied.');
    if (!control) return;
    control.style.minWidth = `${control.offsetWidth}px`;
    control.textContent = '\u2713';
    setTimeout(() => { control.textContent = 'Copy'; }, 1200);
  }

  // Dialogs and keys.

  /** What the user writes into a dialog, null if nothing. */
  ask(words, value, type = 'text') {
    const dialog = byId('ask');
    const field = dialog.querySelector('input');
    byId('ask-words').textContent = words;
    Object.assign(field, { value, type });
    return new Promise((resolve) => {
      let answer = null;
      dialog.querySelector('form').onsubmit = (event) => {
        event.preventDefault();
        answer = field.value.trim() || null;
        dialog.close();
      };
      dialog.onclose = () => resolve(answer);
      dialog.showModal();
      field.select();
    });
  }

  openOptions() {
    byId('system').value = this.current.system;
    for (const name of OPTIONS) byId(name).value = this.current.options[name] ?? '';
    byId('options').showModal();
  }

  /** Take what is in the options' fields; a number that cannot be one is not taken, and its field says why. */
  takeOptions() {
    const { current } = this;
    const fields = OPTIONS.map(byId).filter((field) => field.value && field.reportValidity());
    current.system = byId('system').value.trim();
    current.options = Object.fromEntries(fields.map((field) => [field.id, field.valueAsNumber]));
    this.keepOptions();
  }

  /** Keep the current conversation's options, with which new ones begin. */
  keepOptions() {
    const { model, system, options } = this.current;
    this.firstOptions = { model, system, options };
    ofBrowser.set('localinfer.options', JSON.stringify(this.firstOptions));
    if (this.current.turns.length) this.save(this.current);
  }

  /** In narrow windows: show the conversations over the messages, which then cannot be used; or hide them. */
  openSidebar(isWanted) {
    const isOpen = isWanted && getComputedStyle(byId('menu')).display !== 'none';
    document.querySelector('main').inert = isOpen;
    document.body.classList.toggle('menu-open', isOpen);
    byId('menu').setAttribute('aria-expanded', String(isOpen));
    if (isOpen) byId('new').focus();
  }

  /** Escape: close what is open, else stop the reply. */
  escape() {
    if (document.body.classList.contains('menu-open')) {
      this.openSidebar(false);
      byId('menu').focus();
    } else if (byId('actions').open) {
      byId('actions').open = false;
      byId('actions').firstElementChild.focus();
    } else this.stop();
  }

  submit() {
    const field = byId('message');
    const isRunning = this.replies.has(this.current.id);
    if (isRunning) this.notice(WAITS, 'Stop it', () => this.stop());
    else if (field.value.trim()) {
      this.send(field.value.trim());
      field.value = '';
      ofTab.remove('localinfer.draft');
      grow(field);
    }
  }

  /** Connect the controls. */
  connect() {
    const clicks = {
      new: () => { this.show(this.fresh()); byId('message').focus(); },
      menu: () => this.openSidebar(true),
      'keys-open': () => byId('keys').showModal(),
      'options-open': () => this.openOptions(),
      rename: () => this.rename(),
      delete: () => this.delete(),
      'export-markdown': () => this.export(toMarkdown(this.current), 'text/markdown', 'md'),
      'export-json': () => this.export(toJson(this.current), 'application/json', 'json'),
    };
    for (const [id, action] of Object.entries(clicks)) byId(id).onclick = action;
    for (const dialog of document.querySelectorAll('dialog')) {
      for (const control of dialog.querySelectorAll('.close')) control.onclick = () => dialog.close();
    }
    byId('options').onchange = () => this.takeOptions();
    byId('actions').onclick = (event) => { if (event.target.tagName === 'BUTTON') byId('actions').open = false; };
    byId('model').onchange = () => {
      this.current.model = byId('model').value;
      this.keepOptions();
      this.showContext();
    };
    byId('composer').onsubmit = (event) => {
      event.preventDefault();
      if (this.replies.has(this.current.id)) this.stop();
      else this.submit();
    };
    byId('message').oninput = (event) => {
      grow(event.target);
      ofTab.set('localinfer.draft', event.target.value);
    };
    const log = byId('log');
    log.onscroll = () => { this.isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END; };
    log.onclick = (event) => {
      if (event.target.className === 'copy-code') this.copyCode(event.target.closest('figure'), event.target);
    };
    document.addEventListener('keydown', (event) => this.key(event));
    document.addEventListener('click', (event) => {
      if (!byId('actions').contains(event.target)) byId('actions').open = false;
      if (event.target === document.body) this.openSidebar(false);
    });
    addEventListener('pagehide', () => this.replies.forEach((reply) => reply.keep()));
    if (this.channel) this.channel.onmessage = () => this.reload();
  }

  copyCode(figure, control) {
    this.copy(figure.querySelector('code').textContent.replace(/\n$/, ''), control);
  }

  /** Take over what another tab changed, except where this one writes. */
  async reload() {
    const ours = new Map([...this.replies.values()].map(({ conversation }) => [conversation.id, conversation]));
    this.conversations = (await this.store.list()).map((one) => ours.get(one.id) ?? one);
    const same = this.conversations.find((one) => one.id === this.current.id);
    if (same && same !== this.current) this.show(same);
    else this.showFrame();
  }

  key(event) {
    const isListOpen = byId('keys').open;
    if (document.querySelector('dialog[open]') && !isListOpen) return;
    const letter = isListOpen ? this.listedLetter(event) : chordOf(event);
    const action = this.chords()[letter];
    if (action) {
      event.preventDefault();
      byId('keys').close();
      action();
    } else if (isListOpen) return;
    else if (asksForKeys(event)) {
      event.preventDefault();
      byId('keys').showModal();
    } else if (event.key === 'Escape') this.escape();
    else if (event.target.id === 'message') this.messageKey(event);
  }

  /** The letter of a key in the list of shortcuts. */
  listedLetter(event) {
    if (event.ctrlKey || event.metaKey) return null;
    return /^[a-z]$/i.test(event.key) ? event.key.toUpperCase() : letterAt(event);
  }

  /** What the letters do that are shortcuts. */
  chords() {
    return {
      N: () => byId('new').click(),
      L: () => this.toConversations(),
      M: () => byId('message').focus(),
      R: () => this.regenerate(),
      G: () => this.continueReply(),
      C: () => this.copyLastCode(),
      O: () => this.openOptions(),
    };
  }

  messageKey(event) {
    if (sends(event)) {
      event.preventDefault();
      this.submit();
    } else if (event.key === 'ArrowUp' && !event.target.value && !this.replies.has(this.current.id)) {
      event.preventDefault();
      this.views.findLast((view) => view.turn.role === 'user')?.edit();
    }
  }

  toConversations() {
    this.openSidebar(true);
    (document.querySelector('nav [aria-current]') ?? byId('new')).focus();
  }

  copyLastCode() {
    const figure = [...document.querySelectorAll('.code')].at(-1);
    if (figure) this.copyCode(figure, figure.querySelector('.copy-code'));
  }
}

async function main() {
  await new App(await Store.open()).start();
}

main();
