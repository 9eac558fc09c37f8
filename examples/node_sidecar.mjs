// Asks a model of a program in JavaScript: `node node_sidecar.mjs [MODEL]`. Needs `localinfer` in PATH.
//
// The server is this program's child, ends with it however it ends, and answers nobody who lacks the token.

import { spawn } from "node:child_process";
import { randomBytes } from "node:crypto";
import { once } from "node:events";
import { createInterface } from "node:readline";

async function startServer(model) {
  const token = randomBytes(32).toString("hex");
  const words = ["serve", "--ready-json", "--port", "0", "--token-env", "LOCALINFER_TOKEN", "--until-stdin-ends"];
  const child = spawn("localinfer", model ? [...words, "-m", model] : words, {
    env: { ...process.env, LOCALINFER_TOKEN: token },
    stdio: ["pipe", "pipe", "ignore"],
  });
  await once(child, "spawn").catch(({ message }) => {
    throw new Error(`${message}: put localinfer in PATH, or install it by: pip install localinfer`);
  });
  for await (const line of createInterface({ input: child.stdout })) {
    const { host, port, error } = JSON.parse(line);
    if (error) throw new Error([error.message, error.way_out].filter(Boolean).join("; "));
    return { child, token, url: `http://${host}:${port}/v1/chat/completions` };
  }
  throw new Error("the server ended before it was ready");
}

async function* ask(server, messages, signal) {
  const response = await fetch(server.url, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${server.token}` },
    body: JSON.stringify({ model: "any", messages, stream: true }),
    signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let text = "";
  for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
    const events = (text + part).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const { choices, error } = JSON.parse(data);
      if (error) throw new Error(error.message);
      yield choices[0]?.delta.content ?? "";
    }
  }
}

async function stopServer({ child }) {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const ended = once(child, "exit");
  child.stdin.end();
  await ended;
}

let server;
try {
  server = await startServer(process.argv[2]);
  const messages = [{ role: "user", content: "Tell me a story." }];
  for await (const text of ask(server, messages, AbortSignal.timeout(120_000))) process.stdout.write(text);
  process.stdout.write("\n");
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  if (server) await stopServer(server);
}
