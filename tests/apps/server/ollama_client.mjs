// What npm's package `ollama`, unmodified, reads of a server: node ollama_client.mjs URL URL_OF_SCRIPTED_MODELS
import assert from "node:assert/strict"
import { pathToFileURL } from "node:url"

const { Ollama } = await import(pathToFileURL(process.env.OLLAMA_MODULE))
const [url, scriptedUrl] = process.argv.slice(2)
const client = new Ollama({ host: url })
const scripted = new Ollama({ host: scriptedUrl })
const messages = [{ role: "user", content: "Tell me a story." }]
const options = { temperature: 0, num_predict: 8 }

const whole = await client.chat({ model: "demo", messages, options })
assert.equal(whole.eval_count, 8)
assert.equal(whole.done_reason, "length")
let text = ""
let last
for await (const part of await client.chat({ model: "demo:latest", messages, options, stream: true })) {
  text += part.message.content
  last = part
}
assert.equal(text, whole.message.content)
assert.ok(last.done && last.total_duration > 0)

const first = await client.generate({ model: "demo", prompt: messages[0].content, options })
const second = await client.generate({ model: "demo", prompt: "And then?", context: first.context, options })
assert.deepEqual(second.context.slice(0, first.context.length), first.context)

assert.equal((await client.embed({ model: "demo", input: ["A cat.", "A dog."] })).embeddings.length, 2)
assert.equal((await client.embeddings({ model: "demo", prompt: "A cat." })).embedding.length, 256)
assert.equal((await client.list()).models[0].name, "demo:latest")
assert.equal((await client.show({ model: "demo" })).details.family, "llama")
assert.equal((await client.ps()).models[0].context_length, 1024)
assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/)

const tools = ["look", "count"].map((name) => ({ type: "function", function: { name, parameters: { type: "object" } } }))
const calls = []
for await (const part of await scripted.chat({ model: "calls", messages, tools, think: true, stream: true }))
  calls.push(...(part.message.tool_calls ?? []))
assert.deepEqual(calls.map((call) => [call.function.name, call.function.arguments]), [
  ["look", { at: "b" }],
  ["count", { to: 3 }],
])

await assert.rejects(scripted.chat({ model: "nobody", messages }), /model 'nobody' not found/)
await assert.rejects(client.copy({ source: "demo", destination: "other" }), /not copied/)
await assert.rejects(client.pull({ model: "llama3.2" }), /org\/repo/)
await assert.rejects(async () => {
  for await (const part of await scripted.chat({ model: "failing", messages, stream: true })) text += part
}, /the server failed/)
console.log("done")
