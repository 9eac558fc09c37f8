// Conversations: plain objects, and what is made of them.
'use strict';

const OPTIONS = ['temperature', 'max_tokens', 'seed'];
const ALMOST_FULL = 0.85;
const UNFINISHED = ['length', 'stopped', 'interrupted', 'error'];

function newConversation(model, options) {
  const now = new Date().toISOString();
  return { id: makeId(), name: '', model, system: '', options: {}, ...options, turns: [], created: now, changed: now };
}

/** What is sent for the next reply, or for the rest of the last one. Other replies without text are left out, and
 *  messages that follow each other joined. */
function requestBody({ model, system, options, turns }, continues = false) {
  const messages = system ? [{ role: 'system', content: system }] : [];
  for (const turn of turns) {
    const { role, content, reasoning } = turn;
    const last = messages.at(-1);
    if (!content && role === 'assistant' && !(continues && turn === turns.at(-1))) continue;
    if (last?.role === role) last.content += `\n\n${content}`;
    else messages.push({ role, content, ...(reasoning ? { reasoning_content: reasoning } : {}) });
  }
  const continuing = continues ? { continue_final_message: true, add_generation_prompt: false } : {};
  const streaming = { stream: true, stream_options: { include_usage: true }, return_progress: true };
  return { model, messages, ...streaming, ...continuing, ...options };
}

/** Whether a reply has an end to come: it was stopped or cut, or broke off, and the context has room. */
function canContinue({ role, content, reasoning, finish_reason: reason, stats }, contextLength) {
  const isFull = stats && contextLength && stats.prompt_tokens + stats.completion_tokens >= contextLength;
  return role === 'assistant' && Boolean(content || reasoning)
    && UNFINISHED.includes(reason) && !isFull;
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
    return `${turn.error} ${canContinue(turn, contextLength) ? 'Continue goes on with the reply.' : 'Regenerate tries again.'}`;
  }
  if (turn.finish_reason === 'stopped') return 'Stopped.';
  if (turn.finish_reason === 'interrupted') return 'Cut off when the page was closed. Continue goes on with it.';
  if (turn.finish_reason !== 'length') return null;
  return stats && contextLength && stats.prompt_tokens + stats.completion_tokens >= contextLength
    ? 'Cut: the context is full. Start a new conversation, or shorten an earlier message with Edit.'
    : 'Cut at the maximum of tokens, which Options raises. Continue goes on with it.';
}

function toJson({ id, name, model, system, options, turns, created, changed }) {
  return `${JSON.stringify({ id, name, model, system, options, turns, created, changed }, null, 2)}\n`;
}

function toMarkdown({ name, model, system, turns }) {
  const parts = [`# ${name || 'Conversation'}`, ...(system ? [`## System\n\n${system}`] : [])];
  for (const { role, content, reasoning } of turns) {
    const quoted = reasoning ? `> ${reasoning.trim().replaceAll('\n', '\n> ')}\n\n` : '';
    parts.push(`## ${role === 'user' ? 'You' : `Assistant (${model})`}\n\n${quoted}${content.trim()}`);
  }
  return `${parts.join('\n\n')}\n`;
}
