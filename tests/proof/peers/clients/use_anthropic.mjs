// Anthropic's client for Node: messages, streams, tools, counting, and its runner of tools.
import assert from 'node:assert/strict';
import Anthropic from '@anthropic-ai/sdk';

const client = new Anthropic({ baseURL: process.env.URL, apiKey: 'none', maxRetries: 0 });
const ask = { model: 'demo', messages: [{ role: 'user', content: 'Tell me a story.' }], max_tokens: 20 };
const input_schema = { type: 'object', properties: { name: { enum: ['Tom', 'Lily'] } }, required: ['name'] };

const whole = await client.messages.create({ ...ask, system: 'Be kind.' });
assert.ok(whole.content[0].text);
const stream = client.messages.stream(ask);
let told = '';
stream.on('text', (piece) => (told += piece));
assert.equal((await stream.finalMessage()).content[0].text, told);
const called = await client.messages.create({
  ...ask,
  max_tokens: 60,
  tools: [{ name: 'pet', input_schema }],
  tool_choice: { type: 'any', disable_parallel_tool_use: true },
});
assert.equal(called.stop_reason, 'tool_use');
assert.ok(['Tom', 'Lily'].includes(called.content.find((block) => block.type === 'tool_use').input.name));
const counted = await client.messages.countTokens({ model: 'demo', messages: ask.messages });
assert.equal(counted.input_tokens, 14);
assert.ok((await client.models.list()).data[0].id);
// It asks for a thread with its first turn.
const answers = [];
const runner = client.beta.messages.toolRunner({
  ...ask,
  max_tokens: 60,
  max_iterations: 2,
  tool_choice: { type: 'tool', name: 'pet' },
  tools: [
    {
      name: 'pet',
      input_schema,
      run: ({ name }) => {
        answers.push(name);
        return 'A cat.';
      },
      parse: (input) => input,
    },
  ],
});
let turns = 0;
for await (const message of runner) turns += message.content.length > 0;
assert.ok(turns >= 1 && answers.length >= 1 && ['Tom', 'Lily'].includes(answers[0]));
