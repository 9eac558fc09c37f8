// Conversations: a record and messages, and what is made of them.
'use strict';

const OPTIONS = ['temperature', 'max_tokens', 'seed'];
const FIELDS = ['id', 'name', 'model', 'system', 'options', 'created', 'changed', 'head', 'first', 'version'];
const UNFINISHED = ['length', 'stopped', 'interrupted', 'error'];
const ALMOST_FULL = 0.85;
const REPLY_TOKENS = 1024;
const SUMMARY_TURN = 'Summarise our conversation so far.';
const SUMMARY_REQUEST = 'Write a summary of what we have said, from which alone we can go on: questions, answers and '
  + 'decisions, every name and number, and what is still open. Write nothing but the summary.';

/** A conversation. Its messages are a tree, in which each names the one that it follows: an edited message and another
 *  reply stand beside the former ones, so that nothing which two tabs write takes the place of something else. What is
 *  shown and read is the way from a first message to the head. */
class Conversation {
  constructor(record, messages = []) {
    Object.assign(this, record);
    this.messages = new Map();
    this.followers = new Map();
    this.way = null;
    for (const message of messages) this.put(message);
  }

  /** Add a message, or what is newer of one that is here; gives the one that stays. */
  put(message) {
    const known = this.messages.get(message.id);
    if (known) return isNewer(message, known) ? Object.assign(known, message) : known;
    this.messages.set(message.id, message);
    const beside = this.followers.get(message.parent) ?? [];
    this.followers.set(message.parent, beside);
    const at = beside.findLastIndex((one) => one.created <= message.created);
    beside.splice(at + 1, 0, message);
    return message;
  }

  /** Take over what the store had when it was read. */
  take(record, messages) {
    for (const message of messages) this.put(message);
    if (record.version >= this.version) Object.assign(this, record);
    this.way = null;
  }

  /** The messages that are shown, the first first. */
  get turns() {
    if (this.way?.head === this.head) return this.way.turns;
    const added = [];
    let turn = this.messages.get(this.head);
    for (; turn && turn.id !== this.way?.head; turn = this.messages.get(turn.parent)) added.push(turn);
    this.way = { head: this.head, turns: [...(turn ? this.way.turns : []), ...added.reverse()] };
    return this.way.turns;
  }

  /** A message that was not there before, behind another or behind the head. */
  next(role, content, parent = this.head, more = {}) {
    const reply = role === 'assistant' ? { reasoning: '', finish_reason: null } : {};
    const created = new Date().toISOString();
    return { id: makeId(), conversation: this.id, parent, version: 1, created, role, content, ...reply, ...more };
  }

  /** The messages that stand in each other's place, one of them a given one. */
  versions(message) {
    return (this.followers.get(message.parent) ?? []).filter(({ role }) => role === message.role);
  }

  /** The last message of the way that continues behind one, by the newest messages. */
  endBehind(message) {
    let end = message;
    for (let next; (next = this.followers.get(end.id)?.at(-1));) end = next;
    return end;
  }

  /** Replies that nobody has said to be at an end. */
  unfinished() {
    return [...this.messages.values()].filter((one) => one.role === 'assistant' && !one.finish_reason);
  }

  /** What the store keeps beside the messages. */
  record() {
    return Object.fromEntries(FIELDS.map((name) => [name, this[name] ?? null]));
  }
}

/** Whether one state of a message comes after another: each change counts its version on. */
function isNewer(message, known) {
  if (message.version !== known.version) return message.version > known.version;
  return !known.finish_reason && sizeOf(message) > sizeOf(known);
}

const sizeOf = ({ content, reasoning }) => content.length + (reasoning?.length ?? 0);

function newConversation({ model, system, options }) {
  const now = new Date().toISOString();
  return new Conversation({ id: makeId(), name: '', model, system, options, created: now, changed: now, head: null,
    first: null, version: 0 });
}

/** A conversation as one list of turns, as exports have it and as this page once kept it, as record and messages. */
function fromTurns({ turns, others = [], ...kept }) {
  const record = Object.fromEntries(FIELDS.map((name) => [name, kept[name] ?? null]));
  let parent = null;
  const messages = turns.map((turn, index) => {
    // Ids of their own, so that the same list gives the same messages whoever takes it over.
    const message = { id: `${kept.id}-${index}`, version: 1, parent, created: kept.created, ...turn };
    message.conversation = kept.id;
    parent = message.id;
    return message;
  });
  for (const other of others) messages.push({ version: 1, ...other, conversation: kept.id });
  return { record: { ...record, head: parent, version: 1 }, messages };
}

/** Whether a value is a list of pictures and sounds, as turns have them. */
function isMedia(value) {
  const isOne = (one) => isRecord(one) && ['image', 'audio'].includes(one.type) && typeof one.data === 'string'
    && /^[A-Za-z0-9+/]*=*$/.test(one.data);
  return Array.isArray(value) && value.every(isOne);
}

/** What a file holds that was exported as JSON, as record and messages with a new id, if it is one that is here; null
 *  for other files. */
function imported(text, isHere) {
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    return null;
  }
  const isTurn = (turn) => isRecord(turn) && ['user', 'assistant'].includes(turn.role)
    && typeof turn.content === 'string' && (turn.media === undefined || isMedia(turn.media));
  if (!isRecord(value) || !Array.isArray(value.turns) || !value.turns.every(isTurn)) return null;
  const others = Array.isArray(value.others) ? value.others.filter((one) => isTurn(one) && one.id) : [];
  const id = typeof value.id === 'string' && !isHere(value.id) ? value.id : makeId();
  const ids = new Map([...value.turns, ...others].map((one, index) => [one.id ?? index, makeId()]));
  const clean = (one, index) => ({
    ...one,
    ...(one.role === 'assistant' ? { finish_reason: one.finish_reason ?? 'stop' } : {}),
    id: ids.get(one.id ?? index),
    parent: ids.get(one.parent) ?? null,
    created: textOr(one.created, ''),
    version: 1,
  });
  const turns = value.turns.map((one, index) => {
    const { parent, ...turn } = clean(one, index);
    return turn;
  });
  const now = new Date().toISOString();
  return fromTurns({
    ...checkedOptions(value),
    id,
    name: textOr(value.name, '') || 'Imported',
    created: textOr(value.created, now),
    changed: now,
    first: ids.get(value.first) ?? null,
    turns,
    others: others.map(clean),
  });
}

/** The part of a conversation that the model reads: from a last summary on, or from where older messages are left out. */
function turnsRead({ turns, first }) {
  const summary = turns.findLastIndex((turn, index) => turn.is_summary && turns[index + 1]?.content
    && turns[index + 1].finish_reason);
  const start = turns.findIndex(({ id }) => id === first);
  return turns.slice(Math.max(0, summary, start));
}

/** What is sent for the next reply, or for the rest of the last one. Other replies without text are left out, and
 *  messages that follow each other joined. */
function requestBody({ model, system, options, turns }, continues = false) {
  const messages = system ? [{ role: 'system', content: system }] : [];
  for (const turn of turns) {
    const { role, reasoning } = turn;
    const content = turn.is_summary && turn === turns.at(-1) ? SUMMARY_REQUEST : turn.content;
    const last = messages.at(-1);
    const parts = partsOf(turn);
    if (!content && role === 'assistant' && !(continues && turn === turns.at(-1))) continue;
    if (last?.role === role) last.content = joined(last.content, parts.length ? [...parts, textPart(content)] : content);
    else {
      const sent = parts.length ? [...parts, ...(content ? [textPart(content)] : [])] : content;
      messages.push({ role, content: sent, ...(reasoning ? { reasoning_content: reasoning } : {}) });
    }
  }
  const continuing = continues ? { continue_final_message: true, add_generation_prompt: false } : {};
  const streaming = { stream: true, stream_options: { include_usage: true }, return_progress: true };
  return { model, messages, ...streaming, ...continuing, ...options };
}

const textPart = (text) => ({ type: 'text', text });

/** The pictures and sounds of a turn, as they are sent. */
function partsOf({ media = [] }) {
  return media.map(({ type, name, data }) => (type === 'image'
    ? { type: 'image_url', image_url: { url: `data:;base64,${data}` } }
    : { type: 'input_audio', input_audio: { data, format: name?.split('.').at(-1) || 'wav' } }));
}

/** The contents of two messages that follow each other, as one. */
function joined(first, second) {
  if (typeof first === 'string' && typeof second === 'string') return `${first}\n\n${second}`;
  const listed = (content) => (typeof content === 'string' ? [textPart(content)] : content);
  return [...listed(first), ...listed(second)];
}

/** From which message on what is read takes so many tokens at most, by the tokens that all of it takes; null if there is
 *  no such later question. used: tokens of all that is read. */
function questionWithin(turns, used, most) {
  const room = used ? textSize(turns) * most / used : 0;
  let size = 0;
  let found = null;
  for (let index = turns.length - 1; index > 0; index -= 1) {
    size += sizeOf(turns[index]);
    if (turns[index].role !== 'user') continue;
    // The last question stays, however long it is.
    if (found && size > room) break;
    found = turns[index];
  }
  return found;
}

/** Tokens of what the model reads, as far as they were counted: of the last reply and its prompt, or of a prompt that was
 *  too long. Of what was left out since then, as many are taken off as its share of the text. */
function tokensUsed(conversation) {
  const { turns } = conversation;
  const last = turns.findLastIndex((turn) => turn.stats || turn.too_long);
  if (last < 0) return 0;
  const { stats, too_long: tooLong, read_from: from } = turns[last];
  const counted = tooLong ?? stats.prompt_tokens + stats.completion_tokens;
  const begins = turns.indexOf(turnsRead(conversation)[0]);
  const began = Math.max(0, turns.findIndex(({ id }) => id === from));
  if (begins <= began) return counted;
  return Math.round(counted * textSize(turns.slice(begins, last + 1)) / textSize(turns.slice(began, last + 1)));
}

const textSize = (turns) => turns.reduce((sum, turn) => sum + sizeOf(turn), 0) || 1;

/** Whether a reply has an end to come: it was stopped or cut, or broke off, and the context has room. */
function canContinue({ role, content, reasoning, finish_reason: reason, stats }, contextLength) {
  const isFull = stats && contextLength && stats.prompt_tokens + stats.completion_tokens >= contextLength;
  return role === 'assistant' && Boolean(content || reasoning) && UNFINISHED.includes(reason) && !isFull;
}

/** How near a context is to its end, in words; null while there is room. */
function fullnessOf(used, most) {
  if (!most || used <= ALMOST_FULL * most) return null;
  return used >= most ? 'full' : 'soon full';
}

/** What a reply cost, of the last chunk of its stream. */
function statsOf(timings) {
  return {
    prompt_tokens: timings.cache_n + timings.prompt_n,
    cached_tokens: timings.cache_n,
    completion_tokens: timings.predicted_n,
    time_to_first_token_seconds: timings.prompt_ms / 1000,
    tokens_per_second: timings.predicted_per_second,
  };
}

const perSecond = (rate) => (rate < 100 ? rate.toFixed(1) : grouped(rate));

function describeStats(stats) {
  const share = stats.prompt_tokens ? Math.round(100 * stats.cached_tokens / stats.prompt_tokens) : 0;
  const first = stats.time_to_first_token_seconds;
  return [
    `${grouped(stats.completion_tokens)} tokens`,
    ...(stats.tokens_per_second ? [`${perSecond(stats.tokens_per_second)} tokens/s`] : []),
    `first token after ${first < 1 ? `${Math.round(1000 * first)} ms` : `${first.toFixed(1)} s`}`,
    `${share}% of the prompt cached`,
  ].join(' \u00b7 ');
}

/** Why a reply ended before its end, in words with what to do; null if it did not. */
function describeEnd(turn, contextLength) {
  const { stats } = turn;
  if (turn.error) {
    if (!turn.may_try_again) return turn.error;
    return `${turn.error} ${canContinue(turn, contextLength) ? 'Continue completes the reply.' : 'Regenerate tries again.'}`;
  }
  if (turn.finish_reason === 'stopped') return 'Stopped.';
  if (turn.finish_reason === 'interrupted') {
    const way = canContinue(turn, contextLength) ? 'Continue completes it.' : 'Regenerate answers anew.';
    return `Cut off when the page was closed. ${way}`;
  }
  if (turn.finish_reason !== 'length') return null;
  return stats && contextLength && stats.prompt_tokens + stats.completion_tokens >= contextLength
    ? 'Cut: the context is full. Make room for more, or shorten an earlier message with Edit.'
    : 'Cut at the maximum of tokens, which Options raises. Continue completes it.';
}

/** All of a conversation: the messages that are shown as `turns`, the others as `others`. */
function toJson(conversation) {
  const { id, name, model, system, options, turns, created, changed, first } = conversation;
  const shown = new Set(turns);
  const others = [...(conversation.messages?.values() ?? [])].filter((one) => !shown.has(one));
  const more = { ...(others.length ? { others } : {}), ...(first ? { first } : {}) };
  return `${JSON.stringify({ id, name, model, system, options, turns, ...more, created, changed }, null, 2)}\n`;
}

function toMarkdown({ name, model, system, turns }) {
  const parts = [`# ${name || 'Conversation'}`, ...(system ? [`## System\n\n${system}`] : [])];
  for (const { role, content, reasoning, media = [] } of turns) {
    const shown = media.map(({ type, name }) => `[${type === 'image' ? 'picture' : 'sound'} ${name}]\n\n`).join('');
    const quoted = reasoning ? `> ${reasoning.trim().replaceAll('\n', '\n> ')}\n\n` : '';
    parts.push(`## ${role === 'user' ? 'You' : `Assistant (${model})`}\n\n${quoted}${shown}${content.trim()}`);
  }
  return `${parts.join('\n\n')}\n`;
}
