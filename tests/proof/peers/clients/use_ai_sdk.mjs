// The AI SDK with its OpenAI-compatible provider: text, streams, objects, tools and embeddings.
import assert from 'node:assert/strict';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { embedMany, generateObject, generateText, streamText, tool } from 'ai';
import { z } from 'zod';

const provider = createOpenAICompatible({
  name: 'localinfer',
  baseURL: `${process.env.URL}/v1`,
  supportsStructuredOutputs: true,
});
const model = provider('demo');
const ask = { model, prompt: 'Tell me a story.', maxOutputTokens: 20, temperature: 0, maxRetries: 0 };
const Pet = z.object({ name: z.enum(['Tom', 'Lily']) });

const { text, usage } = await generateText(ask);
assert.ok(text && usage.outputTokens === 20);
let told = '';
for await (const piece of streamText(ask).textStream) told += piece;
assert.equal(told, text);
const { object } = await generateObject({ ...ask, maxOutputTokens: 60, schema: Pet });
assert.ok(['Tom', 'Lily'].includes(object.name));
const { toolCalls } = await generateText({
  ...ask,
  maxOutputTokens: 60,
  tools: { pet: tool({ description: 'Gives a pet.', inputSchema: Pet }) },
  toolChoice: { type: 'tool', toolName: 'pet' },
});
assert.ok(['Tom', 'Lily'].includes(toolCalls[0].input.name));
const { embeddings } = await embedMany({ model: provider.embeddingModel('demo'), values: ['A cat.', 'A dog.'] });
assert.deepEqual(embeddings.map((one) => one.length), [256, 256]);
