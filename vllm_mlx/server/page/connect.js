// What other programs need to use this server, ready to copy.

import { copyButton } from "./copy.js";
import { byId, element } from "./dom.js";
import { usesKey } from "./server.js";

const AGENTS = ["claude", "codex", "opencode"];
const HERE = ["127.0.0.1", "localhost", "[::1]"];
const USUAL_PORT = "8000";
let shown = null;

export function showConnect({ served_model_names: names }) {
  const { origin, hostname, port } = location, isHere = HERE.includes(hostname);
  const facts = JSON.stringify([names, usesKey()]);
  if (facts === shown) return; // the buttons stay as they are
  shown = facts;
  const where = isHere && port === USUAL_PORT ? "" : ` --url ${origin}`;
  const key = usesKey() && !isHere ? " --api-key KEY" : "";
  byId("connect-rows").replaceChildren(
    ...row("OpenAI base URL", `${origin}/v1`), ...row("Anthropic base URL", origin), ...names.flatMap((name) => row("Model", name)),
    ...AGENTS.flatMap((agent) => row(`Start ${agent}`, `vllm-mlx launch ${agent}${where}${key}`)),
  );
  byId("connect-key").textContent = !usesKey() ? "This server asks for no API key. Where a program wants one, any word will do."
    : isHere ? "Programs need an API key of this server. On this machine, launch finds it in the settings of the server; where it does not, add --api-key KEY."
    : "Programs need an API key of this server: put yours in the place of KEY.";
}

const row = (name, text) => [element("dt", {}, name), element("dd", {}, element("code", {}, text), copyButton(() => text, `Copy ${text}`))];
