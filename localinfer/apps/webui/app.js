// The page: conversations, and what its controls do.
'use strict';

const WAITS = 'Your message is sent when the reply is complete.';
const ELSEWHERE = 'Another tab writes in this conversation.';
const URGENT_MILLISECONDS = 10000;

class App {
  constructor(store) {
    this.store = store;
    this.server = new Server((wasWrong) => this.ask(
      `${wasWrong ? 'That token was not accepted. ' : ''}The token of this server:`, '', 'password'));
    this.models = [];
    this.conversations = [];
    this.current = null;
    this.replies = new Map();   // What this tab writes, by conversation.
    this.others = new Map();    // What other tabs write: { words }.
    this.waiting = null;        // The conversation in which the message is sent when its reply is complete.
    this.firstOptions = ofBrowser.read('localinfer.options', checkedOptions) ?? { model: '', system: '', options: {} };
    this.tabs = new Tabs((told) => this.told(told));
    this.log = new MessageLog(this);
    this.sidebar = new Sidebar(this);
    this.attachments = new Attachments(this);
  }

  async start() {
    this.conversations = (await this.store.list()).map((record) => new Conversation(record));
    const id = ofTab.get('localinfer.current');
    this.connect();
    byId('message').value = ofTab.get('localinfer.draft') ?? '';
    grow(byId('message'));
    byId('message').focus();
    await this.show(this.conversations.find((one) => one.id === id) ?? this.fresh());
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
      if (wanted && this.current.head) this.notice(`${wanted} is not served here; another model will answer.`);
    }
    if (!this.models.length) this.notice('No model that can chat is served here. Start the server with -m MODEL.');
    byId('model').replaceChildren(...this.models.map(({ id }) => element('option', { value: id, textContent: id })));
    this.log.update();
    this.showFrame();
  }

  // What is shown.

  /** Show a conversation, whose messages are read when it is shown first. */
  async show(conversation) {
    this.current = conversation;
    ofTab.set('localinfer.current', conversation.id);
    this.sidebar.open(false);
    if (conversation.version) await this.refresh(conversation);
    if (this.current !== conversation) return;
    this.log.isAtEnd = true;
    this.log.show();
    this.showFrame();
  }

  /** Everything around the messages. */
  showFrame() {
    const { current } = this;
    const isRunning = this.isWritten(current);
    byId('title').textContent = current.name || 'New conversation';
    document.title = current.name ? `${current.name} - localinfer` : 'localinfer';
    byId('model').value = current.model;
    byId('actions').hidden = !current.head;
    byId('send').textContent = isRunning ? 'Stop' : 'Send';
    byId('log').setAttribute('aria-busy', String(isRunning));
    this.sidebar.show();
    this.attachments.show();
    this.showContext();
  }

  showContext() {
    const used = this.contextUsed();
    const most = this.contextLength();
    const words = `${grouped(used)} ${most ? `of ${grouped(most)} ` : ''}tokens of context`;
    const fullness = fullnessOf(used, most);
    byId('context-words').textContent = fullness ? `${words}: ${fullness}` : words;
    byId('context').classList.toggle('full', Boolean(fullness));
    byId('context').setAttribute('aria-valuenow', String(used));
    byId('context').setAttribute('aria-valuemax', String(most ?? used));
    byId('context').setAttribute('aria-valuetext', words);
    byId('gauge').firstChild.style.width = `${most ? Math.min(100, 100 * used / most) : 0}%`;
    byId('room-open').hidden = !fullness;
  }

  model() {
    return this.models.find((model) => model.id === this.current.model);
  }

  contextLength() {
    return this.model()?.context_length ?? null;
  }

  contextUsed() {
    return tokensUsed(this.current);
  }

  /** What writes a turn now, in this tab or another; null if nothing does. */
  writerOf(turn) {
    const reply = this.replies.get(turn.conversation);
    if (reply?.turn === turn) return reply;
    return turn.role === 'assistant' && !turn.finish_reason ? this.others.get(turn.conversation) ?? null : null;
  }

  isWritten({ id }) {
    return this.replies.has(id) || this.others.has(id);
  }

  touch() {
    this.log.touch();
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

  /** Take a notice away, if it is still there. */
  unnotice(words) {
    if (byId('notice').firstElementChild.textContent === words) byId('notice').hidden = true;
  }

  /** Tell those who hear the page. */
  say(words) {
    byId('status').textContent = words;
  }

  // What other tabs do.

  /** Take over what another tab tells. */
  async told({ kind, id, ...more }) {
    const conversation = this.known(id);
    if (kind === 'stop') this.replies.get(id)?.stop(more.isUrgent);
    else if (kind === 'piece') this.takePiece(conversation, more);
    else if (kind === 'want') this.tellWhole(id);
    else if (kind === 'whole') this.takeWhole(conversation, more.message);
    else if (kind === 'deleted') this.wasDeleted(conversation);
    else if (kind === 'changed') await this.wasChanged(id, conversation);
  }

  /** The conversation with an id, null if this tab has none. */
  known(id) {
    return this.current?.id === id ? this.current : this.conversations.find((one) => one.id === id) ?? null;
  }

  takePiece(conversation, { message, at, content, reasoning, words }) {
    const turn = conversation?.messages.get(message);
    if (!turn || turn.finish_reason) return;
    const { content: { length }, reasoning: { length: thought } } = turn;
    if (length === at.content && thought === at.reasoning) {
      turn.content += content;
      turn.reasoning += reasoning;
    } else if (length < at.content || thought < at.reasoning) this.tabs.tell('want', conversation.id);
    const other = this.others.get(conversation.id);
    if (other) other.words = `${words}, in another tab`;
    if (conversation === this.current) this.touch();
  }

  tellWhole(id) {
    const reply = this.replies.get(id);
    if (reply) this.tabs.tell('whole', id, { message: reply.turn });
  }

  takeWhole(conversation, message) {
    if (!conversation?.messages.has(message.id)) return;
    conversation.put(message);
    if (conversation === this.current) this.touch();
  }

  wasDeleted(conversation) {
    if (!conversation) return;
    this.replies.get(conversation.id)?.stop(true);
    this.conversations = this.conversations.filter((one) => one !== conversation);
    if (conversation === this.current) {
      this.notice('This conversation was deleted in another tab.', 'Keep it', () => this.restore(conversation));
    }
    this.showFrame();
  }

  async wasChanged(id, conversation) {
    if (conversation && conversation === this.current) {
      // It may have been deleted, and have come back.
      if (await this.refresh(conversation)) this.add(conversation);
    } else {
      const found = await this.store.load(id);
      // There is one object for each, which another call may have made in the meantime.
      const known = this.known(id);
      if (found && known) known.take(found.record, known.messages.size ? found.messages : []);
      else if (found) this.add(new Conversation(found.record, found.messages));
    }
    this.conversations.sort((a, b) => b.changed.localeCompare(a.changed));
    if (conversation === this.current) {
      this.log.show();
      this.log.refresh();
    }
    this.showFrame();
  }

  /** Put a conversation on top of the list, in place of what has its id. */
  add(conversation) {
    this.conversations = [conversation, ...this.conversations.filter((one) => one.id !== conversation.id)];
  }

  /** Take over what the store has of a conversation; false if it has none. */
  async refresh(conversation) {
    const isRead = conversation.messages.size > 0;
    const found = await this.store.load(conversation.id, isRead ? conversation.version : null);
    if (!found) return false;
    this.adopt(conversation, found);
    this.watch(conversation);
    return true;
  }

  adopt(conversation, { record, messages }) {
    const former = conversation.head;
    conversation.take(record, messages);
    // A message that is being edited stays, though another tab continued from another one.
    const edited = conversation === this.current ? this.log.edited : null;
    if (edited && !conversation.turns.includes(edited)) {
      conversation.head = former;
      this.isBehind = true;
    }
  }

  /** Show what was written elsewhere while a message was edited. */
  async afterEdit() {
    if (!this.isBehind) return;
    this.isBehind = false;
    this.current.version = -1;
    await this.show(this.current);
  }

  /** Where a reply is not at its end, wait until nobody writes it, and say then that it was cut off. */
  async watch(conversation) {
    const { id } = conversation;
    if (this.isWritten(conversation) || !conversation.unfinished().length) return;
    this.others.set(id, { words: 'Another tab writes this reply' });
    this.tabs.tell('want', id);
    await this.tabs.writes.whenFree(id);
    this.others.delete(id);
    const isHeld = await this.tabs.writes.hold(id, async () => {
      const found = await this.store.load(id, conversation.version);
      // It may have been deleted in the meantime.
      if (!found) return;
      this.adopt(conversation, found);
      await this.closeCut(conversation);
    });
    if (conversation === this.current) {
      this.log.show();
      this.log.refresh();
    }
    this.showFrame();
    this.sendWaiting(conversation);
    // Another tab came first, and writes the next reply.
    if (!isHeld) this.watch(conversation);
  }

  /** Say of replies without an end that they were cut off: while this tab may write, no other writes them. */
  async closeCut(conversation) {
    const cut = conversation.unfinished();
    if (!cut.length) return;
    for (const turn of cut) {
      const kept = this.store.running(turn);
      if (kept && isNewer(kept, turn)) Object.assign(turn, kept);
      // Its tab may have gone when it had ended, and was not saved yet.
      turn.finish_reason ??= 'interrupted';
      turn.version += 1;
    }
    await this.save(conversation, {}, cut, false);
    for (const turn of cut) this.store.forgetRunning(turn);
  }

  // What the user does with messages.

  fresh() {
    const isServed = !this.models.length || this.models.some(({ id }) => id === this.firstOptions.model);
    return newConversation({ ...this.firstOptions, ...(isServed ? {} : { model: this.models[0].id }) });
  }

  /** Send a message; false if nothing was sent, since another tab writes. */
  send(text, media = []) {
    const { current } = this;
    return this.write(current, () => {
      current.name ||= (text.trim().split('\n')[0] || media[0]?.name || '').slice(0, 60);
      const turn = current.next('user', text, current.head, media.length ? { media } : {});
      return [turn, current.next('assistant', '', turn.id)];
    });
  }

  regenerate() {
    const { current } = this;
    const last = current.turns.at(-1);
    if (last?.role !== 'assistant' || this.isWritten(current)) return false;
    return this.write(current, () => [current.next('assistant', '', last.parent)]);
  }

  /** Go on with the last reply, which was cut or stopped. */
  continueReply() {
    const { current } = this;
    const turn = current.turns.at(-1);
    if (!turn || this.isWritten(current) || !canContinue(turn, this.contextLength())) return false;
    return this.write(current, () => [Object.assign(turn, { version: turn.version + 1, finish_reason: null, notices: [],
      error: null, may_try_again: null })], { continues: true });
  }

  /** Have another message in place of one; whoever writes is stopped. */
  edit(former, text) {
    const { current } = this;
    this.stopWriting(current, true);
    return this.write(current, () => {
      const { media } = former;
      const turn = current.next('user', text, former.parent, media ? { media } : {});
      return [turn, current.next('assistant', '', turn.id)];
    }, { patience: URGENT_MILLISECONDS });
  }

  /** Show another version of a message, and what came after it. */
  async choose(message) {
    const { current } = this;
    current.head = current.endBehind(message).id;
    this.log.show();
    this.showFrame();
    await this.save(current, { head: current.head });
  }

  /** Add messages, the last of which is a reply, and have it written, while no other tab writes in the conversation;
   *  true once the messages are kept, false if another does not end in time. make: gives them, behind the newest state. */
  write(conversation, make, { continues = false, patience } = {}) {
    byId('notice').hidden = true;
    return new Promise((resolve) => {
      this.tabs.writes.hold(conversation.id, async () => {
        await this.catchUp(conversation);
        await this.closeCut(conversation);
        const messages = make();
        const turn = messages.at(-1);
        const reply = new Reply(this, conversation, turn, continues);
        this.replies.set(conversation.id, reply);
        await this.save(conversation, { head: turn.id, name: conversation.name, first: conversation.first }, messages);
        // Nothing is shown as sent before it is kept.
        for (const message of messages) conversation.put(message);
        conversation.head = turn.id;
        resolve(true);
        await this.fill(reply);
      }, patience).then((isDone) => {
        if (!isDone) this.notice(ELSEWHERE);
        resolve(isDone);
        if (!isDone) return;
        this.sendWaiting(conversation);
        // A model that had to be loaded may have less context than its file allows.
        if (this.model()?.state !== 'loaded') this.findModels();
      });
    });
  }

  /** Before writing: take over what is new in the store, if what is shown leads to it. */
  async catchUp(conversation) {
    const found = conversation.version ? await this.store.load(conversation.id, conversation.version) : null;
    if (!found) return;
    const { head } = conversation;
    conversation.take(found.record, found.messages);
    const leads = conversation.turns.some((turn) => turn.id === head);
    if (!leads) conversation.head = head;
  }

  async fill(reply) {
    const { conversation, turn } = reply;
    this.add(conversation);
    if (conversation === this.current) {
      this.log.isAtEnd = true;
      this.log.show();
      this.log.viewOf(turn)?.update();
    }
    this.showFrame();
    // The button that was pressed may be gone.
    if (document.activeElement === document.body) byId('message').focus();
    this.say('Writing a reply.');
    await reply.run();
    turn.version += 1;
    // A reply also fails where the page goes away: then what was kept before stays.
    if (!reply.isLeft) reply.keep();
    await this.save(conversation, {}, [turn]);
    // For tabs that keep the conversation, should it have been deleted.
    this.tabs.tell('whole', conversation.id, { message: turn });
    this.store.forgetRunning(turn);
    this.replies.delete(conversation.id);
    this.say(turn.error ?? `The reply is complete: ${grouped(turn.content.length)} characters.`);
    if (this.current === conversation) this.log.refresh();
    this.showFrame();
  }

  stop() {
    this.stopWriting(this.current, false);
  }

  /** Have the reply of a conversation stopped, whichever tab writes it. */
  stopWriting({ id }, isUrgent) {
    this.replies.get(id)?.stop(isUrgent);
    if (this.others.has(id)) this.tabs.tell('stop', id, { isUrgent });
  }

  // What the user does with conversations.

  /** Keep what changed; a conversation that another tab deleted comes back, since something was written in it. */
  async save(conversation, fields, messages = [], isWanted = !this.replies.get(conversation.id)?.isStopped) {
    const state = { ...conversation.record(), version: Math.max(0, conversation.version) };
    try {
      let record = await this.store.change(conversation.id, fields, messages, conversation.version ? null : state);
      if (!record && isWanted) {
        // Newer than whatever any tab has seen of it.
        state.version = Date.now();
        const all = [...conversation.messages.values(), ...messages];
        record = await this.store.change(conversation.id, fields, all, state);
      }
      const isNext = record?.version === conversation.version + 1;
      if (isNext) Object.assign(conversation, fields, { version: record.version, changed: record.changed });
      // Where another tab changed something in between, that is still to be read.
      else if (record?.version > conversation.version) this.wasChanged(conversation.id, conversation);
      this.tabs.tell('changed', conversation.id);
    } catch (error) {
      this.notice(`This conversation could not be kept (${error.message}). Delete old ones, or export it.`);
    }
  }

  async restore(conversation) {
    await this.save(conversation, {}, [...conversation.messages.values()], true);
    this.add(conversation);
    await this.show(conversation);
  }

  async rename(conversation = this.current) {
    const name = await this.ask('Name of this conversation:', conversation.name);
    if (!name) return;
    conversation.name = name;
    await this.save(conversation, { name });
    this.showFrame();
  }

  async delete(conversation = this.current) {
    if (!conversation.messages.size) await this.refresh(conversation);
    this.replies.get(conversation.id)?.stop(true);
    this.conversations = this.conversations.filter((one) => one !== conversation);
    await this.store.delete(conversation.id);
    this.tabs.tell('deleted', conversation.id);
    if (conversation === this.current) await this.show(this.fresh());
    else this.showFrame();
    this.notice(`${conversation.name} was deleted.`, 'Undo', () => this.restore(conversation));
  }

  /** Add the conversation of a file that was exported as JSON. */
  async import(text, name) {
    const found = imported(text, (id) => this.conversations.some((one) => one.id === id));
    if (!found) {
      this.notice(`${name} is no conversation that this page exported as JSON.`);
      return;
    }
    const conversation = new Conversation({ ...found.record, version: 0 }, found.messages);
    await this.save(conversation, {}, found.messages);
    this.add(conversation);
    await this.show(conversation);
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

  // Room in the context, as /context makes it in the terminal.

  openRoom() {
    const [used, most] = [this.contextUsed(), this.contextLength()];
    byId('room-words').textContent = most ? `${grouped(used)} of ${grouped(most)} tokens are used.` : '';
    byId('room').showModal();
  }

  /** Let the model read on from a later question, behind which half of the context is free. */
  async shiftContext() {
    const { current } = this;
    const first = questionWithin(turnsRead(current), this.contextUsed(), (this.contextLength() ?? 0) / 2);
    if (!first) {
      this.notice('There is but one question, which stays. Shorten it with Edit, or start a new conversation.');
      return;
    }
    current.first = first.id;
    await this.save(current, { first: first.id });
    this.log.show();
    this.notice('The model no longer reads the messages above the line.');
    this.showContext();
  }

  /** Have the conversation summed up, and let the model read on from the summary. */
  summarise() {
    const { current } = this;
    if (this.isWritten(current)) return false;
    return this.write(current, () => {
      const most = this.contextLength();
      const room = most ? most - Math.min(REPLY_TOKENS, most / 4) : Infinity;
      const read = turnsRead(current);
      const used = this.contextUsed();
      if (used > room) current.first = questionWithin(read, used, room)?.id ?? current.first;
      const turn = current.next('user', SUMMARY_TURN, current.head, { is_summary: true });
      return [turn, current.next('assistant', '', turn.id)];
    });
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
    if (this.current.head) this.save(this.current, this.firstOptions);
  }

  /** Escape: close what is open, else stop the reply. */
  escape() {
    if (document.body.classList.contains('menu-open')) {
      this.sidebar.open(false);
      byId('menu').focus();
    } else if (byId('actions').open) {
      byId('actions').open = false;
      byId('actions').firstElementChild.focus();
    } else this.stop();
  }

  /** Send what is written, or once the reply is complete. */
  async submit() {
    const field = byId('message');
    const text = field.value.trim();
    if (!text && !this.attachments.media.length) return;
    if (this.isWritten(this.current)) {
      this.waiting = this.current;
      this.notice(WAITS, 'Not yet', () => { this.waiting = null; });
      return;
    }
    this.waiting = null;
    field.value = '';
    grow(field);
    const { current } = this;
    const media = this.attachments.take();
    const isSent = await this.send(text, media);
    if (!isSent) {
      this.attachments.giveBack(media);
      field.value = field.value ? `${text}\n${field.value}` : text;
      grow(field);
    }
    ofTab.set('localinfer.draft', field.value);
    if (isSent || current !== this.current) return;
    await this.refresh(current);
    this.showFrame();
    this.submit();
  }

  /** Send what waited for the end of a conversation's reply, unless that was stopped or failed. */
  sendWaiting(conversation) {
    if (this.waiting !== conversation || this.isWritten(conversation)) return;
    this.waiting = null;
    this.unnotice(WAITS);
    const isGood = ['stop', 'length'].includes(conversation.turns.at(-1)?.finish_reason);
    if (conversation === this.current && isGood) this.submit();
  }

  /** Connect the controls. */
  connect() {
    const clicks = {
      new: () => { this.show(this.fresh()); byId('message').focus(); },
      'keys-open': () => byId('keys').showModal(),
      'options-open': () => this.openOptions(),
      'room-open': () => this.openRoom(),
      'room-shift': () => this.shiftContext(),
      'room-summary': () => this.summarise(),
      'room-new': () => byId('new').click(),
      rename: () => this.rename(),
      delete: () => this.delete(),
      'export-markdown': () => this.export(toMarkdown(this.current), 'text/markdown', 'md'),
      'export-json': () => this.export(toJson(this.current), 'application/json', 'json'),
    };
    for (const [id, action] of Object.entries(clicks)) byId(id).onclick = action;
    for (const dialog of document.querySelectorAll('dialog')) {
      for (const control of dialog.querySelectorAll('.close')) control.addEventListener('click', () => dialog.close());
    }
    byId('options').onchange = () => this.takeOptions();
    byId('actions').onclick = (event) => { if (event.target.tagName === 'BUTTON') byId('actions').open = false; };
    byId('model').onchange = () => {
      this.current.model = byId('model').value;
      this.keepOptions();
      this.log.update();
      this.attachments.show();
      this.showContext();
    };
    byId('composer').onsubmit = (event) => {
      event.preventDefault();
      if (this.isWritten(this.current)) this.stop();
      else this.submit();
    };
    byId('message').oninput = (event) => {
      grow(event.target);
      ofTab.set('localinfer.draft', event.target.value);
      // What is changed is not sent before it is asked for again.
      this.waiting = null;
      this.unnotice(WAITS);
    };
    document.addEventListener('keydown', (event) => this.key(event));
    document.addEventListener('click', (event) => {
      if (!byId('actions').contains(event.target)) byId('actions').open = false;
      if (event.target === document.body) this.sidebar.open(false);
    });
    addEventListener('pagehide', () => this.replies.forEach((reply) => reply.leave()));
    this.log.connect();
    this.sidebar.connect();
    this.attachments.connect();
  }

  copyCode(figure, control) {
    this.copy(figure.querySelector('code').textContent.replace(/\n$/, ''), control);
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
      L: () => this.sidebar.focus(),
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
    } else if (event.key === 'ArrowUp' && !event.target.value && !this.isWritten(this.current)) {
      event.preventDefault();
      this.log.views.findLast((view) => view.turn.role === 'user' && !view.turn.is_summary)?.edit();
    }
  }

  copyLastCode() {
    const figure = [...document.querySelectorAll('.code')].at(-1);
    if (figure) this.copyCode(figure, figure.querySelector('.copy-code'));
  }
}

let app = null;

async function main() {
  const store = await Store.open(() => {
    byId('log').append(element('p', { className: 'note', textContent: 'Close the other tabs with this page, or reload '
      + 'them: they are of an older version, which keeps conversations in another way.' }));
  });
  app = new App(store);
  await app.start();
}

main();
