// Replies: one request each, which goes on while another conversation is shown.
'use strict';

const KEEP_MILLISECONDS = 500;
const STOP_MILLISECONDS = 1500;

class Reply {
  /** continues: the turn has text, and the rest of it is wanted. */
  constructor(app, conversation, turn, continues) {
    Object.assign(this, { app, conversation, turn, continues });
    this.controller = new AbortController();
    this.id = null;
    this.isStopped = false;
    this.keptAt = 0;
    this.words = 'Waiting for the model';
  }

  /** Fill the turn until the stream ends, however it ends. */
  async run() {
    const { turn, conversation } = this;
    const end = conversation.turns.indexOf(turn) + Number(this.continues);
    const body = requestBody({ ...conversation, turns: conversation.turns.slice(0, end) }, this.continues);
    try {
      for await (const chunk of this.app.server.reply(body, this.controller.signal)) this.take(chunk);
      if (this.isStopped || !turn.finish_reason) turn.finish_reason = this.isStopped ? 'stopped' : 'stop';
    } catch (error) {
      turn.finish_reason = this.isStopped ? 'stopped' : 'error';
      if (!this.isStopped) {
        turn.error = error instanceof Failure ? error.message : `This page failed: ${error.message}`;
        turn.may_try_again = error.mayTryAgain ?? true;
      }
    }
  }

  take(chunk) {
    const { turn } = this;
    this.id = chunk.id;
    const [choice] = chunk.choices;
    turn.reasoning += choice?.delta.reasoning_content ?? '';
    turn.content += choice?.delta.content ?? '';
    turn.finish_reason = choice?.finish_reason ?? turn.finish_reason;
    if (choice?.delta.content || choice?.delta.reasoning_content) this.words = 'Writing';
    else if (chunk.prompt_progress) this.words = progressInWords(chunk.prompt_progress);
    if (chunk.timings) turn.stats = statsOf(chunk.timings);
    if (chunk.timings?.notices) turn.notices = chunk.timings.notices;
    this.app.touch();
    if (!this.isStopped && performance.now() > this.keptAt + KEEP_MILLISECONDS) this.keep();
  }

  keep() {
    this.keptAt = performance.now();
    this.app.store.keepRunning(this.conversation.id, this.turn);
  }

  /** End it: the server is asked, so that the cost comes too, and left if that takes long. */
  stop() {
    if (this.isStopped) return;
    this.isStopped = true;
    const leave = () => this.controller.abort();
    if (!this.id) leave();
    else this.app.server.cancel(this.id).catch(leave);
    setTimeout(leave, STOP_MILLISECONDS);
  }
}

function progressInWords({ position, processed, total }) {
  if (position) return `Waiting for ${position} other ${position === 1 ? 'reply' : 'replies'}`;
  return `Reading the prompt: ${grouped(processed)} of ${grouped(total)} tokens`;
}
