// Runs the scripts of a page without a browser: `node page_in_node.js FILE` prints all HTML that they put into it.
// FILE is JSON: `js` is the script, `texts` what elements hold by id, `visits` the addresses and searches to try.

const fs = require("fs"), vm = require("vm");
const { js, texts, visits, searches } = JSON.parse(fs.readFileSync(process.argv[2], "utf-8"));
const written = [], elements = new Map();
const context = new Proxy({}, { get: (_, name) => (name === "measureText" ? () => ({ width: 10 }) : () => {}), set: () => true });

class Element {
  constructor(id) {
    Object.assign(this, { id, textContent: texts[id] ?? "", value: "", title: "", dataset: {}, style: {}, hidden: false });
    Object.assign(this, { clientWidth: 1300, clientHeight: 600, scrollTop: 0 });
  }
  set innerHTML(html) { written.push(html); }
  append() {}
  addEventListener() {}
  querySelector() { return new Element(""); }
  querySelectorAll() { return []; }
  getContext() { return context; }
}

const document = {
  getElementById: (id) => elements.get(id) ?? elements.set(id, new Element(id)).get(id),
  createElement: () => new Element(""),
  addEventListener() {},
  querySelector: () => new Element(""),
  querySelectorAll: () => [],
  body: new Element("body"),
  documentElement: new Element("html"),
};
class ResizeObserver { observe() {} }
const page = vm.createContext({
  document, ResizeObserver, Blob, Response, DecompressionStream, Uint8Array, atob, console, performance, setTimeout,
  location: { hash: "" }, addEventListener() {}, devicePixelRatio: 1, decodeURIComponent,
  matchMedia: () => ({ matches: false }), getComputedStyle: () => ({ getPropertyValue: () => "" }),
});

async function main() {
  vm.runInContext(js, page);
  while (!document.body.dataset.ready) await new Promise((done) => setTimeout(done, 5));
  for (const address of visits) {
    page.location.hash = `#${encodeURIComponent(address)}`;
    await vm.runInContext("route()", page);
  }
  for (const words of searches) vm.runInContext("find", page)(words);
  console.log(JSON.stringify(written));
}
process.on("unhandledRejection", (error) => { console.error(error); process.exit(1); });
main();
