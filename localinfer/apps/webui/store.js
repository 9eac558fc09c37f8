// The store: conversations and their messages in IndexedDB, which merges what tabs write; a reply that is being written in
// localStorage too, which also keeps what is written while the page goes away.
'use strict';

const RUNNING = 'localinfer.running.';

class Store {
  /** Open the database; without one, as in some private windows, conversations last as long as the page. onBlocked: told
   *  if tabs with an older version of the page have to be closed first. */
  static async open(onBlocked) {
    const request = globalThis.indexedDB?.open('localinfer', 2);
    if (!request) return new Store(null);
    request.onblocked = onBlocked;
    request.onupgradeneeded = ({ oldVersion }) => upgrade(request.result, request.transaction, oldVersion);
    return new Store(await finished(request).catch(() => null));
  }

  constructor(database) {
    this.database = database;
    this.unkept = new Map();
    // A newer version of the page opens it in another tab.
    if (database) database.onversionchange = () => database.close();
  }

  /** Do something with the two stores at once; the result of `act` when all is kept. Nothing comes in between. */
  transact(mode, act) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(['conversations', 'messages'], mode);
      let result = null;
      transaction.oncomplete = () => resolve(result);
      transaction.onabort = () => reject(transaction.error ?? new Error('the browser gave it up'));
      Promise.resolve(act(transaction.objectStore('conversations'), transaction.objectStore('messages')))
        .then((made) => { result = made; }, () => { transaction.abort(); });
    });
  }

  /** The records of all conversations, the one that changed last first. */
  async list() {
    const all = this.database ? await this.transact('readonly', (records) => finished(records.getAll()))
      : [...this.unkept.values()].map(({ record }) => record);
    return all.sort((a, b) => b.changed.localeCompare(a.changed));
  }

  /** A conversation's record and messages, no messages if the record has a known version; null if there is none. */
  async load(id, version = null) {
    if (!this.database) return this.unkept.get(id) ?? null;
    return this.transact('readonly', async (records, messages) => {
      const record = await finished(records.get(id));
      if (!record) return null;
      const isKnown = record.version === version;
      return { record, messages: isKnown ? [] : await finished(messages.index('conversation').getAll(id)) };
    });
  }

  /** Change fields of a conversation's record and add messages, or newer states of them; the record as it then is. created:
   *  the record to begin with, if there is none; else null is given, and nothing changes. */
  async change(id, fields, messages = [], created = null) {
    const changed = new Date().toISOString();
    const next = (record) => ({ ...record, ...fields, changed, version: record.version + 1 });
    if (!this.database) {
      const kept = this.unkept.get(id) ?? (created && { record: created, messages: [] });
      if (!kept) return null;
      this.unkept.set(id, { record: next(kept.record), messages: kept.messages });
      return next(kept.record);
    }
    return this.transact('readwrite', async (records, kept) => {
      const record = await finished(records.get(id)) ?? created;
      if (!record) return null;
      const known = await Promise.all(messages.map((message) => finished(kept.get(message.id))));
      messages.forEach((message, index) => {
        if (!known[index] || isNewer(message, known[index])) kept.put(message);
      });
      records.put(next(record));
      return next(record);
    });
  }

  /** Delete a conversation; gives what it was, null if there was none. */
  async delete(id) {
    if (!this.database) {
      const kept = this.unkept.get(id) ?? null;
      this.unkept.delete(id);
      return kept;
    }
    return this.transact('readwrite', async (records, kept) => {
      const record = await finished(records.get(id));
      const messages = await finished(kept.index('conversation').getAll(id));
      records.delete(id);
      for (const message of messages) {
        kept.delete(message.id);
        this.forgetRunning(message);
      }
      return record ? { record, messages } : null;
    });
  }

  /** The conversations that have a text in a message, small letters as capitals. */
  async search(text) {
    const sought = text.toLowerCase();
    const found = new Set();
    if (!this.database) return found;
    await this.transact('readonly', (_, messages) => new Promise((resolve, reject) => {
      const request = messages.openCursor();
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) {
          resolve();
          return;
        }
        const { conversation, content } = cursor.value;
        if (!found.has(conversation) && content.toLowerCase().includes(sought)) found.add(conversation);
        cursor.continue();
      };
    }));
    return found;
  }

  /** Keep what there is of a reply; where the browser's space is full, it is saved when it ends. */
  keepRunning(message) {
    ofBrowser.set(RUNNING + message.id, JSON.stringify(message));
  }

  /** What was kept of a reply, null if nothing was. */
  running({ id }) {
    const isState = (value) => isRecord(value) && typeof value.content === 'string';
    return ofBrowser.read(RUNNING + id, (value) => (isState(value) ? value : null));
  }

  forgetRunning({ id }) {
    ofBrowser.remove(RUNNING + id);
  }
}

/** The result of a request to the database. */
function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Bring a database to this version: the first kept each conversation with all its turns in one record. */
function upgrade(database, transaction, oldVersion) {
  if (oldVersion < 1) database.createObjectStore('conversations', { keyPath: 'id' });
  const messages = database.createObjectStore('messages', { keyPath: 'id' });
  messages.createIndex('conversation', 'conversation');
  if (oldVersion < 1) return;
  const records = transaction.objectStore('conversations');
  records.openCursor().onsuccess = ({ target: { result: cursor } }) => {
    if (!cursor) return;
    const { record, messages: turns } = fromTurns(cursor.value);
    const last = turns.at(-1);
    if (last?.role === 'assistant' && !last.finish_reason) {
      const kept = ofBrowser.read(RUNNING + record.id, (value) => (isRecord(value) ? value : null));
      Object.assign(last, kept, { finish_reason: 'interrupted', error: null });
    }
    ofBrowser.remove(RUNNING + record.id);
    for (const turn of turns) messages.put(turn);
    cursor.update(record);
    cursor.continue();
  };
}
