// servers.py for JavaScript: the servers' addresses, what the scripted one answers, and packages from the client's own folder.
import { renameSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";

export const folder = process.env.MINISGL_CLIENT_FOLDER;
export const load = createRequire(folder + "/");
export const { real, scripted } = JSON.parse(process.env.MINISGL_CLIENTS);

/** The next requests, in order, are answered with these texts. Without any left, a prompt is its own answer. */
export async function replies(...texts) {
  const ids = [];
  for (const prompt of texts) {
    const response = await fetch(`${scripted.url}/tokenize`, {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${scripted.key}` },
      body: JSON.stringify({ prompt, add_special_tokens: false }),
    });
    ids.push((await response.json()).tokens);
  }
  writeFileSync(`${scripted.script}.new`, JSON.stringify({ in_order: ids }));
  renameSync(`${scripted.script}.new`, scripted.script); // at once: the engine may read at any time
}

/** What a model writes to call a tool. */
export const call = (name, args) => `<tool_call>\n${JSON.stringify({ name, arguments: args })}\n</tool_call>`;
