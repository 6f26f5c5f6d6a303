// OpenAI's coding agent, through /v1/responses, with a command that it really runs.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { test } from "node:test";
import { call, folder, replies, scripted } from "./servers.mjs";

/** Events of one run in an empty folder. */
function codex(prompt, ...options) {
  const home = mkdtempSync(`${folder}/home-`);
  const work = `${home}/work`;
  mkdirSync(work);
  writeFileSync(
    `${home}/config.toml`,
    `model = "scripted"
model_provider = "minisgl"
model_context_window = 200000
[model_providers.minisgl]
name = "minisgl"
base_url = "${scripted.url}/v1"
env_key = "MINISGL_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`,
  );
  const env = { ...process.env, CODEX_HOME: home, MINISGL_KEY: scripted.key };
  const words = ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-C", work];
  const done = spawnSync(`${folder}/node_modules/.bin/codex`, [...words, ...options, prompt], {
    env,
    input: "",
    encoding: "utf8",
    timeout: 120_000,
  });
  const events = done.stdout.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  const file = (name) => readFileSync(`${work}/${name}`, "utf8");
  return { done, events, items: events.filter((e) => e.type === "item.completed").map((e) => e.item), file, home };
}

test("an answer and its usage", async () => {
  await replies("It is sunny.");
  const { done, events, items, home } = codex("How is the weather?");
  assert.equal(done.status, 0, done.stderr);
  assert.equal(items.at(-1).text, "It is sunny.");
  const { usage } = events.find((e) => e.type === "turn.completed");
  assert.equal(usage.output_tokens, "It is sunny.".length + 1); // tokens are bytes, and one ends the answer
  rmSync(home, { recursive: true });
});

test("a command is run and the agent sees its output and its own reasoning", async () => {
  await replies("<think>\nWhy not?\n</think>\n\nI will write it." + call("exec_command", { cmd: "echo hello > a.txt; echo it is $((40 + 2))" }));
  const { done, items, file, home } = codex("Write a file."); // without replies left, a prompt is its own answer
  assert.equal(done.status, 0, done.stderr);
  assert.equal(file("a.txt"), "hello\n");
  assert.deepEqual(items.filter((i) => i.type === "command_execution").map((i) => i.exit_code), [0]);
  assert.equal(items.find((i) => i.type === "agent_message").text, "I will write it.");
  assert.match(items.at(-1).text, /assistant: thinks Why not\? I will write it\./);
  assert.match(items.at(-1).text, /tool: [^]*it is 42/);
  rmSync(home, { recursive: true });
});

test("errors show what the server said", async () => {
  await replies();
  const { done, events, home } = codex("hello", "-m", "other");
  assert.notEqual(done.status, 0);
  assert.match(JSON.stringify(events.at(-1)), /'other'/);
  rmSync(home, { recursive: true });
});
