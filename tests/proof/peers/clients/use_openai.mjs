// OpenAI's client for Node: chats, streams, tools, structured output, responses and embeddings.
import assert from 'node:assert/strict';
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: 'none', maxRetries: 0 });
const ask = { model: 'demo', messages: [{ role: 'user', content: 'Tell me a story.' }], max_tokens: 20, temperature: 0 };
const schema = {
  type: 'object',
  properties: { name: { enum: ['Tom', 'Lily'] } },
  required: ['name'],
  additionalProperties: false,
};
const named = (text) => assert.ok(['Tom', 'Lily'].includes(JSON.parse(text).name), text);

const whole = (await client.chat.completions.create(ask)).choices[0].message.content;
let told = '';
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
  told += chunk.choices[0]?.delta?.content ?? '';
}
assert.equal(told, whole);
const form = { type: 'json_schema', json_schema: { name: 'pet', schema, strict: true } };
const pet = await client.chat.completions.create({ ...ask, max_tokens: 60, response_format: form });
named(pet.choices[0].message.content);
const tools = [{ type: 'function', function: { name: 'pet', parameters: schema } }];
const runner = client.chat.completions.stream({
  ...ask,
  max_tokens: 60,
  tools,
  tool_choice: { type: 'function', function: { name: 'pet' } },
});
named((await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments);
const response = await client.responses.create({ model: 'demo', input: 'Hi', max_output_tokens: 5 });
assert.ok(response.output_text);
const events = [];
for await (const event of client.responses.stream({ model: 'demo', input: 'Hi', max_output_tokens: 5 })) {
  events.push(event.type);
}
assert.equal(events[0], 'response.created');
const vectors = await client.embeddings.create({ model: 'demo', input: ['A cat.', 'A dog.'] });
assert.deepEqual(vectors.data.map((one) => one.embedding.length), [256, 256]);
assert.ok((await client.models.list()).data[0].id);
