// The conversations beside the messages: their list, what is sought in it, and files that bring some.
'use strict';

const SEARCH_MILLISECONDS = 200;

class Sidebar {
  constructor(app) {
    this.app = app;
    this.rows = new Map();
    this.sought = '';
    this.found = null;    // Ids of conversations with the sought text in a message; null: it is not known yet.
    this.timer = 0;
  }

  connect() {
    byId('search').oninput = (event) => this.seek(event.target.value.trim());
    byId('import').onclick = () => byId('import-file').click();
    byId('import-file').onchange = async ({ target }) => {
      for (const file of target.files) await this.app.import(await file.text(), file.name);
      target.value = '';
    };
    byId('menu').onclick = () => this.open(true);
  }

  /** Show the conversations; rows of those that were shown stay as they are. */
  show() {
    const { app } = this;
    const shown = app.conversations.filter((one) => this.isWanted(one));
    const rows = shown.map((one) => this.row(one));
    const list = byId('conversations');
    if (rows.length !== list.children.length || rows.some((row, index) => row !== list.children[index])) {
      list.replaceChildren(...rows);
    }
    for (const id of this.rows.keys()) if (!app.conversations.some((one) => one.id === id)) this.rows.delete(id);
    byId('search').hidden = !app.conversations.length;
    byId('kept').textContent = this.sought && !shown.length ? 'Nothing found' : 'Conversations';
  }

  row(conversation) {
    const { app } = this;
    let row = this.rows.get(conversation.id);
    if (!row) {
      const open = button('', () => { app.show(conversation); byId('message').focus(); }, { className: 'open' });
      const act = (sign, label, action) => button(sign, action, { title: label, className: 'act' });
      row = element('li', {}, open, act('\u270e', 'Rename', () => app.rename(conversation)),
        act('\u2715', 'Delete', () => app.delete(conversation)));
      this.rows.set(conversation.id, row);
    }
    const [open, ...acts] = row.children;
    if (open.textContent !== conversation.name) {
      open.textContent = open.title = conversation.name;
      for (const act of acts) act.setAttribute('aria-label', `${act.title} ${conversation.name}`);
    }
    if (conversation === app.current) open.setAttribute('aria-current', 'true');
    else open.removeAttribute('aria-current');
    row.classList.toggle('busy', app.isWritten(conversation));
    return row;
  }

  isWanted({ id, name }) {
    return !this.sought || name.toLowerCase().includes(this.sought.toLowerCase()) || Boolean(this.found?.has(id));
  }

  /** Leave in the list what has a text in its name or its messages. */
  seek(text) {
    this.sought = text;
    this.found = null;
    clearTimeout(this.timer);
    if (text) {
      this.timer = setTimeout(async () => {
        const found = await this.app.store.search(text);
        if (this.sought !== text) return;
        this.found = found;
        this.show();
      }, SEARCH_MILLISECONDS);
    }
    this.show();
  }

  /** In narrow windows: show the conversations over the messages, which then cannot be used; or hide them. */
  open(isWanted) {
    const isOpen = isWanted && getComputedStyle(byId('menu')).display !== 'none';
    document.querySelector('main').inert = isOpen;
    document.body.classList.toggle('menu-open', isOpen);
    byId('menu').setAttribute('aria-expanded', String(isOpen));
    if (isOpen) byId('new').focus();
  }

  /** Go to the list. */
  focus() {
    this.open(true);
    (document.querySelector('nav [aria-current]') ?? byId('new')).focus();
  }
}
