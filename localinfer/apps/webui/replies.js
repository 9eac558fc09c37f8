// Replies: one request each, which continues while another conversation is shown.
'use strict';

const KEEP_MILLISECONDS = 500;
const TELL_MILLISECONDS = 100;
const STOP_MILLISECONDS = 1500;

class Reply {
  /** continues: the turn has text, and the rest of it is wanted. */
  constructor(app, conversation, turn, continues) {
    Object.assign(this, { app, conversation, turn, continues });
    this.controller = new AbortController();
    this.id = null;
    this.isStopped = false;
    this.isLeft = false;
    this.keptAt = 0;
    this.toldAt = 0;
    this.told = { content: turn.content.length, reasoning: turn.reasoning.length };
    this.words = 'Waiting for the model';
  }

  /** Fill the turn until the stream ends, however it ends. */
  async run() {
    const { turn, conversation } = this;
    const turns = turnsRead(conversation);
    turn.read_from = turns[0]?.id ?? null;
    const end = turns.indexOf(turn) + Number(this.continues);
    const body = requestBody({ ...conversation.record(), turns: turns.slice(0, end) }, this.continues);
    let reason = null;
    try {
      for await (const chunk of this.app.server.reply(body, this.controller.signal)) reason = this.take(chunk) ?? reason;
      reason = this.isStopped ? 'stopped' : reason ?? 'stop';
    } catch (error) {
      reason = this.isStopped ? 'stopped' : 'error';
      if (!this.isStopped) {
        turn.error = error instanceof Failure ? error.message : `This page failed: ${error.message}`;
        turn.may_try_again = error.mayTryAgain ?? true;
        turn.too_long = error.numTokens ?? null;
      }
    }
    this.tell();
    turn.finish_reason = reason;
  }

  /** Take what came; gives why the reply ended, where the chunk says it. */
  take(chunk) {
    const { turn } = this;
    this.id = chunk.id;
    const [choice] = chunk.choices;
    turn.reasoning += choice?.delta.reasoning_content ?? '';
    turn.content += choice?.delta.content ?? '';
    if (choice?.delta.content || choice?.delta.reasoning_content) this.words = 'Writing';
    else if (chunk.prompt_progress) this.words = progressInWords(chunk.prompt_progress);
    if (chunk.timings) turn.stats = statsOf(chunk.timings);
    if (chunk.timings?.notices) turn.notices = chunk.timings.notices;
    this.app.touch();
    const now = performance.now();
    if (!this.isStopped && now > this.keptAt + KEEP_MILLISECONDS) this.keep();
    if (now > this.toldAt + TELL_MILLISECONDS) this.tell();
    return choice?.finish_reason;
  }

  keep() {
    this.keptAt = performance.now();
    this.app.store.keepRunning(this.turn);
  }

  /** Keep what there is for the last time, as the page goes away. */
  leave() {
    this.keep();
    this.isLeft = true;
  }

  /** Tell other tabs what came. */
  tell() {
    const { turn, told, words } = this;
    const more = { content: turn.content.slice(told.content), reasoning: turn.reasoning.slice(told.reasoning) };
    this.toldAt = performance.now();
    this.app.tabs.tell('piece', this.conversation.id, { message: turn.id, at: told, ...more, words });
    this.told = { content: turn.content.length, reasoning: turn.reasoning.length };
  }

  /** End it: the server is asked, so that the cost comes too, and left if that takes long, or at once. */
  stop(isUrgent = false) {
    const leave = () => this.controller.abort();
    if (isUrgent) leave();
    if (this.isStopped) return;
    this.isStopped = true;
    if (isUrgent) return;
    if (!this.id) leave();
    else this.app.server.cancel(this.id).catch(leave);
    setTimeout(leave, STOP_MILLISECONDS);
  }
}

function progressInWords({ position, processed, total }) {
  if (position) return `Waiting for ${position} other ${position === 1 ? 'reply' : 'replies'}`;
  return `Reading the prompt: ${grouped(processed)} of ${grouped(total)} tokens`;
}
