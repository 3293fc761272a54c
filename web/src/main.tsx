import { render } from "preact";
import { App } from "./app";
import { embeddedSource, servedSource } from "./data";

async function start(): Promise<void> {
  const place = document.getElementById("app") ?? document.body.appendChild(document.createElement("div"));
  place.id = "app";
  const base = document.documentElement.dataset["profiles"];
  try {
    const source = embeddedSource(document) ?? (await servedSource(base ?? location.href));
    render(<App source={source} />, place);
  } catch (error) {
    place.textContent = `The profiles cannot be shown: ${error instanceof Error ? error.message : String(error)}`;
  }
}

void start();
