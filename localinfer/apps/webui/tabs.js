// Tabs: one of them writes in a conversation at a time, and the others are told what it writes.
'use strict';

const SOON_MILLISECONDS = 300;
const ASK_MILLISECONDS = 200;
const GONE_MILLISECONDS = 1500;

/** What this tab tells the others, and who writes. onTold: is given what another tab tells. */
class Tabs {
  constructor(onTold) {
    this.id = makeId();
    this.writes = globalThis.navigator?.locks ? new WriteLocks(navigator.locks) : new WriteClaims(this);
    this.channel = new BroadcastChannel('localinfer.tabs');
    this.channel.onmessage = ({ data }) => {
      if (data.kind === 'claim' || data.kind === 'held') this.writes.told?.(data);
      else onTold(data);
    };
  }

  /** Tell all other tabs; kind: what it is about. id: the conversation. */
  tell(kind, id, more = {}) {
    this.channel.postMessage({ kind, id, from: this.id, ...more });
  }
}

/** Who writes, by the locks of the browser, which it frees when a tab is closed or dies. */
class WriteLocks {
  constructor(locks) {
    this.locks = locks;
  }

  /** Do something while no other does so with a conversation; false, and it is not done, if another does and does not
   *  end soon. */
  async hold(id, act, patience = SOON_MILLISECONDS) {
    let isDone = false;
    do {
      const given = new AbortController();
      const timer = setTimeout(() => given.abort(), patience);
      await this.locks.request(`localinfer.${id}`, { signal: given.signal }, async () => {
        clearTimeout(timer);
        isDone = true;
        await act();
      }).catch((error) => {
        if (isDone || error.name !== 'AbortError') throw error;
      });
      // On a busy machine the browser itself may have been late.
    } while (!isDone && !(await this.isHeld(id)));
    return isDone;
  }

  async isHeld(id) {
    const { held } = await this.locks.query();
    return held.some(({ name }) => name === `localinfer.${id}`);
  }

  /** Resolved once nobody writes in a conversation. */
  whenFree(id) {
    return this.locks.request(`localinfer.${id}`, { mode: 'shared' }, () => {});
  }
}

/** Who writes, where the browser has no locks, as on pages of other machines without TLS: a tab asks the others, and those
 *  that live answer. Of two that ask at once the one with the smaller id goes first. */
class WriteClaims {
  constructor(tabs) {
    this.tabs = tabs;
    this.held = new Map();    // Conversations that this tab writes in or wants to, and how they end.
    this.asked = new Map();   // Conversations that it asks for, and what is called by an answer.
  }

  told({ kind, id, from }) {
    if (kind === 'held') this.asked.get(id)?.();
    else if (this.held.has(id) || (this.asked.has(id) && this.tabs.id < from)) this.tabs.tell('held', id);
  }

  /** Whether another tab says soon that it writes in a conversation. */
  isHeld(id, patience = ASK_MILLISECONDS) {
    return new Promise((resolve) => {
      const end = (isHeld) => {
        clearTimeout(timer);
        this.asked.delete(id);
        resolve(isHeld);
      };
      const timer = setTimeout(() => end(false), patience);
      this.asked.set(id, () => end(true));
      this.tabs.tell('claim', id);
    });
  }

  async hold(id, act, patience = SOON_MILLISECONDS) {
    const end = performance.now() + patience;
    while (this.held.has(id) || this.asked.has(id) || await this.isHeld(id)) {
      if (performance.now() > end) return false;
      await pause(50);
    }
    this.held.set(id, true);
    try {
      await act();
    } finally {
      this.held.delete(id);
    }
    return true;
  }

  async whenFree(id) {
    while (this.held.has(id) || this.asked.has(id) || await this.isHeld(id, GONE_MILLISECONDS)) {
      await pause(ASK_MILLISECONDS);
    }
  }
}

const pause = (milliseconds) => new Promise((resolve) => { setTimeout(resolve, milliseconds); });
