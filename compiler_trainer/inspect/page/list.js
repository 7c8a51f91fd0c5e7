// A list of any length, in which only the visible rows exist.

class List {
  /** `row(i)` gives the HTML of row i, 20 pixels high. */
  constructor(place, row) {
    this.place = place;
    this.row = row;
    this.count = 0;
    this.inner = document.createElement("div");
    this.shown = document.createElement("div");
    this.shown.style.cssText = "position:absolute;top:0;left:0;min-width:100%";
    this.inner.append(this.shown);
    place.append(this.inner);
    place.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(place);
  }

  show(count, at = 0) {
    this.count = count;
    this.inner.style.height = `${20 * count}px`;
    this.reach(at, true);
    this.draw();
  }

  /** Scroll so that a row is visible, in the middle if it was not. */
  reach(i, anew = false) {
    const top = 20 * i, height = this.place.clientHeight;
    if (anew || top < this.place.scrollTop || top > this.place.scrollTop + height - 40)
      this.place.scrollTop = Math.max(0, top - height / 2);
  }

  draw() {
    const first = Math.max(0, Math.floor(this.place.scrollTop / 20) - 10);
    const last = Math.min(this.count, first + Math.ceil(this.place.clientHeight / 20) + 20);
    const rows = [];
    for (let i = first; i < last; i++) rows.push(this.row(i));
    this.shown.style.transform = `translateY(${20 * first}px)`;
    this.shown.innerHTML = rows.join("");
  }
}

/** Return one line of a graph as HTML, with the words of a query marked. */
function lineHtml(text, words = []) {
  if (text.startsWith("#")) return escapeHtml(text);
  const hash = text.lastIndexOf("   # ");
  const body = hash < 0 ? text : text.slice(0, hash), origin = hash < 0 ? "" : text.slice(hash);
  let html = escapeHtml(body)
    .replace(/%(\w+)/g, '<a data-name="$1">%$1</a>')
    .replace(/ = ([\w.]+)/, ' = <span class="op">$1</span>')
    .replace(/( : \w+\[[^\]]*\]) (\[.*)$/, '<span class="result">$1 <span class="spec">$2</span></span>');
  html += `<span class="origin">${escapeHtml(origin)}</span>`;
  if (!words.length) return html;
  const sought = new RegExp(`(${words.map((w) => escapeHtml(w).replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "gi");
  return html.replace(/(<[^>]*>)|([^<]+)/g, (_, tag, inner) => tag ?? inner.replace(sought, "<mark>$1</mark>"));
}
