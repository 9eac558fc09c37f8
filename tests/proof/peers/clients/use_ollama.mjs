// Ollama's client for Node: chats, streams, structured output, generate, embeddings and the lists of models.
import assert from 'node:assert/strict';
import { Ollama } from 'ollama';

const client = new Ollama({ host: process.env.URL });
const model = (await client.list()).models[0].model;
const ask = { model, messages: [{ role: 'user', content: 'Tell me a story.' }] };
const options = { num_predict: 20, temperature: 0 };

const whole = await client.chat({ ...ask, options });
assert.ok(whole.message.content && whole.eval_count <= 20);
let told = '';
for await (const part of await client.chat({ ...ask, options, stream: true })) told += part.message.content;
assert.equal(told, whole.message.content);
const format = { type: 'object', properties: { name: { enum: ['Tom', 'Lily'] } }, required: ['name'] };
const form = await client.chat({ ...ask, format, options: { num_predict: 60 } });
assert.ok(['Tom', 'Lily'].includes(JSON.parse(form.message.content).name));
assert.ok((await client.generate({ model, prompt: 'Once upon', options })).response);
assert.equal((await client.embed({ model, input: ['A cat.', 'A dog.'] })).embeddings.length, 2);
assert.ok((await client.show({ model })).details);
assert.ok((await client.ps()).models.length);
