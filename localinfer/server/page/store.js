// The store: conversations in IndexedDB; a reply that is being written in localStorage too, which also keeps what is
// written while the page goes away.
'use strict';

class Store {
  /** Open the database; without one, as in some private windows, conversations last as long as the page. */
  static async open() {
    const request = globalThis.indexedDB?.open('localinfer', 1);
    if (!request) return new Store(null);
    request.onupgradeneeded = () => request.result.createObjectStore('conversations', { keyPath: 'id' });
    return new Store(await finished(request).catch(() => null));
  }

  constructor(database) {
    this.database = database;
    this.unkept = new Map();
  }

  conversations(mode) {
    return this.database.transaction('conversations', mode).objectStore('conversations');
  }

  /** All conversations, the one that changed last first, with the replies that the page's end cut off. */
  async list() {
    const all = this.database ? await finished(this.conversations('readonly').getAll()) : [...this.unkept.values()];
    for (const conversation of all) restoreRunning(conversation);
    return all.sort((a, b) => b.changed.localeCompare(a.changed));
  }

  async save(conversation) {
    const copy = structuredClone(conversation);
    if (this.database) await finished(this.conversations('readwrite').put(copy));
    else this.unkept.set(copy.id, copy);
  }

  async delete(id) {
    this.unkept.delete(id);
    if (this.database) await finished(this.conversations('readwrite').delete(id));
  }

  /** Keep what there is of a reply; where the browser's space is full, it is saved when it ends. */
  keepRunning(id, turn) {
    ofBrowser.set(`localinfer.running.${id}`, JSON.stringify(turn));
  }

  forgetRunning(id) {
    ofBrowser.remove(`localinfer.running.${id}`);
  }
}

/** The result of a request to the database. */
function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function restoreRunning(conversation) {
  const kept = ofBrowser.read(`localinfer.running.${conversation.id}`, (value) => (isRecord(value) ? value : null));
  const last = conversation.turns.at(-1);
  if (last?.role === 'assistant' && !last.finish_reason) {
    Object.assign(last, kept ?? {}, { error: undefined, finish_reason: 'interrupted' });
  }
}
