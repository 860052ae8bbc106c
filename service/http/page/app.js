// Brings the panels together: which model is shown, and what to do when the server does not answer.

import { Ask } from "./ask.js";
import { Bars } from "./bars.js";
import { Classes } from "./classes.js";
import { Connection } from "./connection.js";
import { by, options, reveal } from "./dom.js";
import { Expert } from "./expert.js";
import * as facts from "./facts.js";
import { Keys } from "./keys.js";
import { Looking } from "./looking.js";
import { Matrix } from "./matrix.js";
import { Recent } from "./recent.js";
import { Unreachable, ask, isAbort, json } from "./server.js";
import { Traffic } from "./traffic.js";

let models = [];
let model = null; // what is shown: a version's facts, its name and its path
let mayReadMetrics = true;

async function openExpert(number) {
  await expert.open(number);
  reveal(by("expert"));
}
async function openClass(id) {
  await classes.open(id);
  reveal(by("classes"));
}

const connection = new Connection(load);
const keys = new Keys(() => {
  mayReadMetrics = true;
  model = null;
  load();
});
const looking = new Looking(look, () => traffic.pause());
const traffic = new Traffic();
const recent = new Recent();
const bars = new Bars(openExpert);
const matrix = new Matrix({ failed, openExpert });
const classes = new Classes({ failed, openExpert });
const expert = new Expert({
  failed,
  opened: (number) => {
    bars.press(number);
    matrix.mark(number);
  },
});
const asking = new Ask({ failed, openExpert, openClass, chosen: (number) => bars.mark(number) });

function failed(error) {
  if (isAbort(error)) return;
  if (error instanceof Unreachable) return lost("The server does not answer.");
  if (error.slug === "loading")
    return lost("The server is starting: its models are still being loaded.");
  if (error.status === 401) return refused(error);
  if (error.slug === "version-not-found" || error.slug === "model-not-found") load();
  else if (!(error.status >= 400)) throw error; // a mistake of this page
}

function lost(text) {
  traffic.pause();
  connection.lost(text);
}

function refused(error) {
  by("main").hidden = true;
  model = null;
  connection.say("");
  keys.ask(error);
}

// Which models there are. What is shown stays, if it is still there.
async function load() {
  try {
    ({ models } = await json("models"));
  } catch (error) {
    return failed(error);
  }
  keys.accepted();
  connection.found();
  models = models.filter(({ versions }) => versions.length);
  if (!models.length) return nothing();
  const known =
    models.find(({ name }) => name === model?.name) ??
    models.find((info) => info.default) ??
    models[0];
  options(
    by("model"),
    models.map(({ name }) => [name, name]),
    known.name,
  );
  await choose(known, model?.version);
}

function nothing() {
  by("main").hidden = true;
  model = null;
  connection.lost("No model is loaded: put a bundle into the models folder.");
}

// A version of a model: the one that was shown, or the one that answers if none is named.
async function choose(info, version) {
  const found =
    info.versions.find((one) => one.version === version) ??
    info.versions.find((one) => one.version === info.version) ??
    info.versions[0];
  options(
    by("version"),
    info.versions.map((one) => [one.version, versionName(info, one.version)]),
    found.version,
  );
  const same =
    model?.name === info.name && model.version === found.version && model.created === found.created;
  if (same && !model.isIncomplete) Object.assign(model, found);
  else
    model = {
      ...found,
      name: info.name,
      path: `models/${encodeURIComponent(info.name)}/versions/${found.version}`,
    };
  facts.show(model);
  facts.refused(info);
  if (!model.isShown) await show(model);
  looking.start();
}

function versionName(info, version) {
  const names = Object.keys(info.labels).filter((label) => info.labels[label] === version);
  if (version === info.version && !names.includes("default")) names.unshift("default");
  return names.length && info.versions.length > 1
    ? `${version} (${names.join(", ")})`
    : `${version}`;
}

// To notice that something was loaded, unloaded or labelled.
const names = (listed) =>
  JSON.stringify(
    listed
      .filter(({ versions }) => versions.length)
      .map((info) => [
        info.name,
        ...info.versions.map(({ version }) => versionName(info, version)),
      ]),
  );

async function show(shown) {
  shown.isShown = true;
  recent.clear();
  by("main").ariaBusy = "true";
  try {
    const { experts } = await json(`${shown.path}/experts`);
    if (shown !== model) return;
    bars.show(experts);
    expert.experts = experts;
    by("main").hidden = false;
    expert.show(shown);
    classes.show(shown);
    await Promise.all([asking.show(shown), matrix.show(shown)]);
    if (shown !== model) return;
    document.title = `${shown.name} ${shown.version}, doubly sparse softmax`;
    by("main").ariaBusy = "false";
  } catch (error) {
    shown.isIncomplete = true; // to be shown anew when the server answers again
    failed(error);
  }
}

async function look() {
  const shown = model;
  if (!shown || !connection.isUp) return;
  try {
    const [{ experts }, listed] = await Promise.all([
      json(`${shown.path}/experts`),
      json("models"),
    ]);
    if (shown !== model) return;
    const info = listed.models.find(({ name }) => name === shown.name);
    const found = info?.versions.find(({ version }) => version === shown.version);
    if (found?.created !== shown.created || names(listed.models) !== names(models))
      return await load();
    Object.assign(shown, found);
    facts.show(shown);
    facts.refused(info);
    bars.follow(experts, recent.take(experts, performance.now() / 1000));
    expert.follow(experts);
    if (mayReadMetrics) await lookAtMetrics();
  } catch (error) {
    failed(error);
  }
}

async function lookAtMetrics() {
  try {
    traffic.take(await ask("metrics"), performance.now() / 1000);
  } catch (error) {
    if (error.status !== 403) throw error;
    mayReadMetrics = false;
    traffic.refuse(`${error.message} So there is no chart.`);
  }
}

by("model").addEventListener("change", () =>
  choose(models.find(({ name }) => name === by("model").value)),
);
by("version").addEventListener("change", () =>
  choose(
    models.find(({ name }) => name === by("model").value),
    Number(by("version").value),
  ),
);

const THEMES = ["system", "dark", "light"];
const root = document.documentElement;

function setTheme(theme) {
  if (theme === "system") {
    delete root.dataset.theme;
    localStorage.removeItem("dss-theme");
  } else {
    root.dataset.theme = theme;
    localStorage.setItem("dss-theme", theme);
  }
  by("theme").textContent = `Theme: ${theme}`;
  matrix.paint();
}

by("theme").textContent = `Theme: ${root.dataset.theme ?? "system"}`;
by("theme").addEventListener("click", () => {
  const now = THEMES.indexOf(root.dataset.theme ?? "system");
  setTheme(THEMES[(now + 1) % THEMES.length]);
});

connection.say("Loading…");
load();
