"use strict";
(() => {
  let data = JSON.parse(document.getElementById("data").textContent);
  const state = { quantity: null, view: -1, token: -1, pinned: false };
  const make = (tag, kind, text) => {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const drawn = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const digits = (value, many = 4) => (value === null || value === undefined ? "not known" : String(Number(value.toPrecision(many))));

  const exact = (value) => (value === 0 || Math.abs(value) >= 0.0005 ? value.toFixed(3) : value.toExponential(1));

  // Curves: the nearest step to the pointer, or the one the arrow keys came to.
  const nearest = (steps, wanted) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle; else high = middle;
    }
    return Math.abs(steps[low] - wanted) <= Math.abs(steps[high] - wanted) ? low : high;
  };
  const left = 46, right = 390;
  const across = (plot, step) => left + (step - plot.dataset.low) / (plot.dataset.high - plot.dataset.low) * (right - left);
  const read = (plot, step) => {
    const curves = data.charts[plot.dataset.chart].curves;
    const main = curves[0], here = main.steps[nearest(main.steps, step)], x = across(plot, here);
    const cursor = plot.querySelector(".cursor"), line = cursor.querySelector("line");
    line.setAttribute("x1", x); line.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    const values = curves.map((curve) => {
      const value = curve.values[nearest(curve.steps, here)];
      return curves.length > 1 ? `${curve.name} ${digits(value)}` : digits(value);
    });
    plot.closest("figure").querySelector(".reading").textContent = `step ${here}: ${values.join(" / ")}`;
    plot.dataset.step = here;
  };
  const unread = (plot) => plot.querySelector(".cursor").setAttribute("visibility", "hidden");
  const walk = (plot, event) => {
    const steps = data.charts[plot.dataset.chart].curves[0].steps;
    const here = nearest(steps, Number(plot.dataset.step ?? steps[steps.length - 1]));
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: steps.length - 1, PageUp: here - 10, PageDown: here + 10 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    read(plot, steps[Math.min(Math.max(to, 0), steps.length - 1)]);
  };
  const readable = (plot) => {
    const point = (event) => {
      const box = plot.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * 400;
      const share = Math.min(Math.max((x - left) / (right - left), 0), 1);
      read(plot, Number(plot.dataset.low) + share * (plot.dataset.high - plot.dataset.low));
    };
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointerleave", () => { if (document.activeElement !== plot) unread(plot); });
    plot.addEventListener("keydown", (event) => walk(plot, event));
    plot.addEventListener("focus", () => read(plot, Number(plot.dataset.step ?? plot.dataset.high)));
    plot.addEventListener("blur", () => unread(plot));
  };

  // The heat map: one tab stop an answer, arrow keys from token to token.
  const tokensOf = (view) => document.querySelectorAll(`.tokens[data-view="${view}"] > i`);
  const quantity = () => data.heat.quantities.find((one) => one.key === state.quantity) ?? data.heat.quantities[0];
  const paint = () => {
    const { key, edges, classes } = quantity();
    document.querySelectorAll(".tokens").forEach((map) => {
      const values = data.heat.views[map.dataset.view].numbers[key] ?? [];
      map.querySelectorAll(":scope > i").forEach((token, place) => {
        const value = values[place];
        const kept = ["control", "chosen"].filter((name) => token.classList.contains(name));
        const colour = value === null || value === undefined ? "none" : classes[edges.filter((edge) => value >= edge).length];
        token.className = [colour, ...kept].join(" ");
      });
    });
    document.querySelectorAll(".scale").forEach((scale) => { scale.hidden = scale.dataset.quantity !== key; });
    document.querySelectorAll('input[name="quantity"]').forEach((input) => { input.checked = input.value === key; });
  };
  const NAMES = {
    divergence: "divergence, nats", student_entropy: "student entropy, nats", teacher_entropy: "teacher entropy, nats",
    logprob: "student log-prob", teacher_logprob: "teacher log-prob", gap: "teacher minus student", weight: "weight",
  };
  const side = (name, known, text, place) => {
    const box = make("div", name);
    box.append(make("h5", "", `${name}: most likely`));
    const list = make("ol");
    known.texts[place].forEach((candidate, rank) => {
      const share = known.shares[place][rank], row = make("li", candidate === text ? "said" : "");
      row.style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
      row.append(make("code", "", candidate.trim() ? candidate.replace(/^ /, "␣") : candidate.replaceAll(" ", "␣") || "∅"));
      row.append(make("span", "", share >= 0.9995 ? "100 %" : share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`));
      list.append(row);
    });
    box.append(list);
    return box;
  };
  const explain = (view, place) => {
    const panel = document.querySelector(".detail"), known = data.heat.views[view];
    const text = known.text[place], list = make("dl");
    for (const [key, name] of Object.entries(NAMES)) {
      const value = (known.numbers[key] ?? [])[place];
      if (value !== null && value !== undefined) list.append(make("dt", "", name), make("dd", "", exact(value)));
    }
    const spoken = make("code", "token", text.replaceAll(" ", "␣") || "∅");
    panel.replaceChildren(spoken, make("p", "where", `token ${place + 1} of ${known.text.length}, ${known.title}`), list);
    const sides = make("div", "sides");
    for (const name of ["student", "teacher"]) if (known.sides[name]) sides.append(side(name, known.sides[name], text, place));
    if (sides.children.length) panel.append(sides);
    else panel.append(make("p", "note", "Preferred tokens are only stored for held-out answers."));
  };
  const choose = (view, place, pinned) => {
    const tokens = tokensOf(view);
    if (!tokens[place]) return;
    document.querySelectorAll(".tokens i.chosen").forEach((token) => { token.classList.remove("chosen"); token.setAttribute("aria-selected", "false"); });
    tokens[place].classList.add("chosen");
    tokens[place].setAttribute("aria-selected", "true");
    Object.assign(state, { view, token: place, pinned });
    explain(view, place);
  };
  const narrow = () => window.matchMedia("(max-width: 60rem)").matches;
  const forget = () => {
    document.querySelectorAll(".tokens i.chosen").forEach((token) => token.classList.remove("chosen"));
    document.querySelector(".detail").replaceChildren();
    Object.assign(state, { view: -1, token: -1, pinned: false });
  };
  const step = (map, event) => {
    const view = Number(map.dataset.view), tokens = [...tokensOf(view)], here = tokens.indexOf(document.activeElement);
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: tokens.length - 1 }[event.key] ?? beside(tokens, here, event.key);
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(view, here, true); return; }
    if (event.key === "Escape") { if (narrow()) forget(); state.pinned = false; return; }
    if (to === undefined || !tokens[to]) return;
    event.preventDefault();
    tokens[here].tabIndex = -1; tokens[to].tabIndex = 0; tokens[to].focus();
  };
  const beside = (tokens, here, key) => {
    if (key !== "ArrowUp" && key !== "ArrowDown") return undefined;
    const from = tokens[here].getBoundingClientRect(), down = key === "ArrowDown";
    let best, least = Infinity;
    tokens.forEach((token, place) => {
      const box = token.getBoundingClientRect(), gap = down ? box.top - from.top : from.top - box.top;
      if (gap < from.height / 2) return;
      const far = gap * 10 + Math.abs(box.left - from.left);
      if (far < least) { least = far; best = place; }
    });
    return best;
  };
  const touchable = (map) => {
    const view = Number(map.dataset.view);
    map.setAttribute("role", "listbox");
    map.setAttribute("aria-orientation", "horizontal");
    map.setAttribute("aria-label", `tokens, ${data.heat.views[view].title}`);
    const tokens = [...tokensOf(view)];
    tokens.forEach((token, place) => {
      token.setAttribute("role", "option");
      token.setAttribute("aria-selected", "false");
      token.tabIndex = place === 0 ? 0 : -1;
    });
    map.addEventListener("pointerover", (event) => {
      const place = tokens.indexOf(event.target);
      if (place >= 0 && !state.pinned) choose(view, place, false);
    });
    map.addEventListener("click", (event) => {
      const place = tokens.indexOf(event.target);
      if (place < 0) return;
      const again = state.pinned && state.view === view && state.token === place;
      choose(view, place, !again);
      if (again && narrow()) forget();
    });
    map.addEventListener("focusin", (event) => {
      const place = tokens.indexOf(event.target);
      if (place >= 0) choose(view, place, state.pinned && state.view === view && state.token === place);
    });
    map.addEventListener("keydown", (event) => step(map, event));
  };
  const dearest = () => {
    let best = [-1, -1], most = -Infinity;
    data.heat.views.forEach((view, number) => {
      if (!view.sides.teacher) return;
      (view.numbers.divergence ?? []).forEach((value, place) => { if (value !== null && value > most) { most = value; best = [number, place]; } });
    });
    return best[0] < 0 ? [0, 0] : best;
  };

  const enhance = (within) => {
    within.querySelectorAll(".plot[data-chart]").forEach(readable);
    within.querySelectorAll(".tokens").forEach(touchable);
    within.querySelectorAll(".controls").forEach((controls) => {
      controls.hidden = false;
      controls.addEventListener("change", (event) => { state.quantity = event.target.value; paint(); });
    });
  };
  const showHeat = () => {
    if (!data.heat.views || !document.querySelector(".tokens")) return;
    paint();
    const known = state.view >= 0 && data.heat.views[state.view]?.text[state.token] !== undefined;
    if (!known && narrow()) return; // there the panel lies over the text, so it waits until it is asked for
    const [view, place] = known ? [state.view, state.token] : dearest();
    choose(view, place, known && state.pinned);
  };
  enhance(document);
  showHeat();

  // A live page: ask for news, put what changed in its place, and leave the reader where he is.
  if (!("live" in document.body.dataset)) return;
  const status = document.querySelector(".live");
  let version = document.body.dataset.live, pause = 1000;
  const say = (text, kind) => { if (status.textContent !== text) status.textContent = text; status.className = `live ${kind}`; };
  const replace = (id, html) => {
    const old = document.getElementById(id), parsed = new DOMParser().parseFromString(html, "text/html").body.firstElementChild;
    const fresh = document.importNode(parsed, true);
    if (!old) return fresh;
    const open = [...old.querySelectorAll("details")].map((part) => part.open);
    const focus = focusPath(old), scrolls = [...old.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
    fresh.querySelectorAll("details").forEach((part, place) => { part.open = open[place] ?? part.open; });
    old.replaceWith(fresh);
    enhance(fresh);
    fresh.querySelectorAll(".scroll").forEach((part, place) => { part.scrollLeft = scrolls[place] ?? 0; });
    if (focus) {
      const target = refind(fresh, focus);
      if (target) { if (focus.step) target.dataset.step = focus.step; target.focus({ preventScroll: true }); }
    }
    return fresh;
  };
  const STOPS = "a, input, summary, [tabindex], .tokens > i";
  const focusPath = (part) => {
    const active = document.activeElement;
    if (!part.contains(active)) return null;
    if (active.dataset.chart) return { chart: active.dataset.chart, step: active.dataset.step };
    const map = active.closest(".tokens");
    if (map) return { view: map.dataset.view, token: [...tokensOf(map.dataset.view)].indexOf(active) };
    if (active.name === "quantity") return { quantity: active.value };
    return { place: [...part.querySelectorAll(STOPS)].indexOf(active) };
  };
  const refind = (part, path) => {
    if (path.chart) return part.querySelector(`[data-chart="${path.chart}"]`);
    if (path.view !== undefined) return part.querySelectorAll(`.tokens[data-view="${path.view}"] > i`)[path.token];
    if (path.quantity) return part.querySelector(`input[value="${path.quantity}"]`);
    return part.querySelectorAll(STOPS)[path.place];
  };
  const anchored = (work) => {
    const anchor = [...document.querySelectorAll("main > section")].find((part) => part.getBoundingClientRect().bottom > 60);
    const id = anchor?.id, before = anchor?.getBoundingClientRect().top;
    work();
    const after = id && document.getElementById(id)?.getBoundingClientRect().top;
    if (window.scrollY > 0 && after !== undefined && after !== before) window.scrollBy({ top: after - before, behavior: "instant" });
  };
  const apply = (news) => {
    data = news.data;
    document.title = news.title;
    document.querySelector("h1").textContent = news.title;
    anchored(() => {
      const main = document.querySelector("main");
      news.order.forEach((id, place) => {
        if (news.html[id] === undefined) return;
        const fresh = replace(id, news.html[id]);
        if (!fresh.isConnected) { main.insertBefore(fresh, main.children[place] ?? null); enhance(fresh); }
      });
      [...main.children].forEach((part) => { if (!news.order.includes(part.id)) part.remove(); });
      const nav = document.querySelector("nav"), bar = new DOMParser().parseFromString(news.links, "text/html").body;
      if (nav.innerHTML !== bar.innerHTML) nav.replaceChildren(...bar.childNodes);
      showHeat();
    });
  };
  const ask = async () => {
    try {
      const answer = await fetch(`news?version=${encodeURIComponent(version)}`, { cache: "no-store" });
      if (!answer.ok) { const reason = await answer.text(); say(reason, "late"); pause = 3000; return; }
      const news = await answer.json();
      if (news.version !== version) {
        apply(news);
        version = news.version;
      }
      say(news.status, news.kind);
      pause = news.finished ? 10000 : 1000;
    } catch (error) {
      say("the watcher has ended; this page is no longer updated", "late");
      pause = 5000;
    }
  };
  const again = async () => { await ask(); setTimeout(again, document.hidden ? 4 * pause : pause); };
  again();
})();
