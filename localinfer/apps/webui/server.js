// The server: requests, streams of events, and its errors in words.
'use strict';

/** Finds events in a stream of text, however it is cut; comments and names of events are passed over. */
class EventReader {
  constructor() {
    this.rest = '';
    this.data = [];
  }

  /** The data of all events that are complete with this text. */
  feed(text) {
    const lines = (this.rest + text).split('\n');
    this.rest = lines.pop();
    const events = [];
    for (const line of lines.map((one) => one.replace(/\r$/, ''))) {
      if (line.startsWith('data:')) this.data.push(line.slice(5).replace(/^ /, ''));
      else if (!line && this.data.length) events.push(this.data.splice(0).join('\n'));
    }
    return events;
  }
}

/** Something that failed, told in a sentence with what to do. mayTryAgain: the same request may have an answer later.
 *  numTokens: of a prompt that is too long for the context. */
class Failure extends Error {
  constructor(message, { mayTryAgain = true, numTokens = null } = {}) {
    super(message);
    Object.assign(this, { mayTryAgain, numTokens });
  }
}

const UNREACHABLE = 'The server does not answer. See whether "localinfer serve" still runs, and start it again if not.';
const CONTEXT_FULL = 'context_length_exceeded';
const WAYS_OUT = {
  [CONTEXT_FULL]: (error) => `This conversation has ${grouped(error.n_prompt_tokens)} tokens, and the model `
    + `reads at most ${grouped(error.n_ctx)}. Make room below, shorten an earlier message with Edit, or start `
    + 'the server with a larger --context-length.',
  queue_full: () => 'The server is busy with other replies. Wait a moment.',
  shutting_down: () => 'The server is being stopped. Start "localinfer serve" again.',
  insufficient_memory: (error) => `${error.message}. Close other programs, or choose a smaller model.`,
};

/** An error of the server as a failure. */
function failureOf(error, status) {
  const wayOut = WAYS_OUT[error?.code];
  const message = error?.message ? `The server says: ${error.message}.` : `The server answered with status ${status}.`;
  const isOurs = error?.type === 'invalid_request_error' || error?.code === CONTEXT_FULL;
  const numTokens = error?.code === CONTEXT_FULL ? error.n_prompt_tokens : null;
  return new Failure(wayOut ? wayOut(error) : message, { mayTryAgain: !isOurs, numTokens });
}

/** The requests of this page. askToken: asks the user for the token, and gives null if there is none. */
class Server {
  constructor(askToken) {
    this.askToken = askToken;
  }

  /** A response; asks for the token where the server wants one. */
  async request(path, options = {}) {
    for (;;) {
      const token = ofTab.get('localinfer.token');
      const headers = { 'content-type': 'application/json', ...(token ? { authorization: `Bearer ${token}` } : {}) };
      const response = await fetch(path, { ...options, headers, cache: 'no-store' }).catch((error) => {
        throw error.name === 'AbortError' ? error : new Failure(UNREACHABLE);
      });
      if (response.ok) return response;
      const { error } = await response.json().catch(() => ({}));
      if (response.status !== 401) throw failureOf(error, response.status);
      // A token that was not accepted is not kept: the next visit asks anew, and blames nobody.
      ofTab.remove('localinfer.token');
      const given = await this.askToken(token !== null);
      if (!given) throw new Failure('The server wants its token. Reload this page to be asked again.');
      ofTab.set('localinfer.token', given);
    }
  }

  /** The models that can chat. */
  async models() {
    const { data } = await (await this.request('/v1/models')).json();
    return data.filter((model) => model.capabilities.includes('chat'));
  }

  /** The chunks of a streamed reply. */
  async* reply(body, signal) {
    const response = await this.request('/v1/chat/completions', { method: 'POST', body: JSON.stringify(body), signal });
    const texts = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new EventReader();
    for (;;) {
      const { value, done } = await texts.read().catch((error) => {
        throw error.name === 'AbortError' ? error : new Failure(`The connection broke off. ${UNREACHABLE}`);
      });
      if (done) throw new Failure(`The reply broke off. ${UNREACHABLE}`);
      for (const data of events.feed(value)) {
        if (data === '[DONE]') return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw failureOf(chunk.error);
        yield chunk;
      }
    }
  }

  /** Ask for the end of a reply, whose stream then ends with what it cost. */
  cancel(id) {
    return this.request(`/requests/${encodeURIComponent(id)}/cancel`, { method: 'POST', body: '{}' });
  }
}
