// An example front end for the API, without a framework. The types in api.d.ts are made
// from the contract: a request that the contract does not know does not compile.

import type { paths } from './api.js';

const api = document.querySelector<HTMLMetaElement>('meta[name=api]')!.content;

// ---- The client: copy this part ----------------------------------------------------

type Method = 'get' | 'post';
type JSONIn<T> = T extends { content: { 'application/json': infer Body } } ? Body : undefined;
type Body<O> = O extends { requestBody: infer B } ? JSONIn<B> : undefined;
type Query<O> = O extends { parameters: { query?: infer Q } } ? Q : undefined;
type Answer<O> = O extends { responses: { 200: infer R } } ? JSONIn<R>
  : O extends { responses: { 201: infer R } } ? JSONIn<R> : undefined;

type Refusals<O> = O extends { responses: infer R } ? R[keyof R] : never;
type ProblemIn<T> = T extends { content: { 'application/problem+json': infer Body } } ? Body : never;
type ProblemBody = { [P in keyof paths]: ProblemIn<Refusals<paths[P][Method]>> }[keyof paths];

// Problem is a refusal of the server. Programs compare code; detail is for people.
class Problem extends Error {
  constructor(readonly status: number, readonly body: ProblemBody, readonly retryAfter: number) {
    super(body.detail);
  }
}

const isRefusal = (error: unknown, code: ProblemBody['code']) =>
  error instanceof Problem && error.body.code === code;

// call sends one request. The browser adds the session's cookie, because of credentials.
async function call<P extends keyof paths, M extends Method>(
  method: M, path: P, input: { body?: Body<paths[P][M]>, query?: Query<paths[P][M]> } = {},
): Promise<Answer<paths[P][M]>> {
  const url = new URL(path, api);
  for (const [name, value] of Object.entries(input.query ?? {})) url.searchParams.set(name, String(value));
  return send(method, url, input.body && JSON.stringify(input.body), { 'content-type': 'application/json' });
}

// upload sends a file. The browser sets the content type, which names the boundary.
async function upload(file: File): Promise<Answer<paths['/files/upload']['post']>> {
  const form = new FormData();
  form.append('file', file);
  return send('post', new URL('/files/upload', api), form);
}

// canRead reads a file to its end. A folder can't be read, nor a file that was changed or removed
// since it was chosen; Firefox then reads more or fewer bytes, without an error. In the middle of an
// upload, this would look like a broken connection.
async function canRead(file: File): Promise<boolean> {
  let size = 0;
  const count = new WritableStream<Uint8Array>({ write: chunk => { size += chunk.length; } });
  try { await file.stream().pipeTo(count); } catch { return false; }
  return size === file.size;
}

async function send<T>(method: Method, url: URL, body?: BodyInit, headers: Record<string, string> = {}): Promise<T> {
  let response: Response;
  try {
    response = await fetch(url, {
      method: method.toUpperCase(),
      credentials: 'include',
      headers: { ...headers, 'x-request-id': crypto.randomUUID() },
      body,
    });
  } catch {
    // Either nobody listens there, or the server does not allow this origin. Its log says which.
    throw new Error(`No answer from ${api}. Does the server run, and does ALLOWED_ORIGINS name ${location.origin}?`);
  }
  if (!response.ok) {
    // The errors of some proxies are not JSON.
    const problem: ProblemBody | null = await response.json().catch(() => null);
    if (!problem) throw new Error(`The answer was ${response.status} ${response.statusText}.`);
    throw new Problem(response.status, problem, Number(response.headers.get('retry-after')));
  }
  return response.status === 204 ? undefined as T : await response.json();
}

// ---- The page ----------------------------------------------------------------------

type Session = Answer<paths['/auth/session']['get']>;

const find = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;
const input = (id: string) => find<HTMLInputElement>(id);
const say = (text: string) => { find('message').textContent = text; };

// People leave the page for their mail, and some browsers then load it anew. So the step
// outlives a reload: sessionStorage has the address that a code was asked for.
const asked = () => sessionStorage.getItem('asked');

// shown is the session that this tab shows. null: nobody's. undefined: not known yet.
let shown: Session | null | undefined;

// show shows what a session may do. The server decides; the page only follows.
function show(session: Session | null) {
  if (session?.user.userId !== shown?.user.userId) find('uploaded').replaceChildren();
  shown = session;
  const accepted = session?.terms.accepted ?? false;
  if (session) sessionStorage.removeItem('asked');
  find('ask').hidden = session !== null;
  find('present').hidden = session !== null || asked() === null;
  find('accept').hidden = session === null || accepted;
  find('hubs').hidden = !accepted;
  find('leave').hidden = session === null;
  find('who').textContent = session?.user.email ?? '';
  find('version').textContent = session?.terms.version ?? '';
}

// lookAgain asks whose session the browser has now. No script can read the cookie, and in
// another tab somebody may have signed in or out.
async function lookAgain() {
  const before = shown;
  let now: Session | null = null;
  try {
    now = await call('get', '/auth/session');
  } catch (error) {
    if (!isRefusal(error, 'unauthenticated')) {
      if (before === undefined) show(null);
      throw error;
    }
  }
  const isStale = shown !== before; // meanwhile, somebody has signed in or out in this tab
  if (isStale || JSON.stringify(now) === JSON.stringify(before)) return;
  show(now);
  await listHubs();
}

// explain turns an error into a sentence, and into the step that helps.
async function explain(error: unknown) {
  if (!(error instanceof Problem)) return say(String(error));
  const { code, detail, requestId, errors } = error.body;
  if (code === 'unauthenticated') show(null);
  if (code === 'terms_not_accepted') show(await call('get', '/auth/session'));
  const fields = (errors ?? []).map(e => `${e.field} ${e.detail}.`).join(' ');
  const again = new Date(Date.now() + error.retryAfter * 1000);
  const wait = error.retryAfter ? `Try again at ${again.toLocaleTimeString()}.` : '';
  say([detail, fields, wait, `(${code}, request ${requestId})`].filter(Boolean).join(' '));
}

// on runs an action when a form is sent. After a 429 its button waits as long as the
// server asks for.
let running = 0; // actions

function on(form: string, action: () => Promise<void>) {
  find<HTMLFormElement>(form).addEventListener('submit', async event => {
    event.preventDefault();
    const button = find(form).querySelector('button')!;
    button.disabled = true;
    let wait = 0;
    running++;
    try {
      say('');
      await action();
    } catch (error) {
      if (error instanceof Problem) wait = error.retryAfter;
      await explain(error);
    }
    running--;
    setTimeout(() => { button.disabled = false; }, wait * 1000);
  });
}

on('ask', async () => {
  await call('post', '/auth/otp/request', { body: { email: input('email').value } });
  present();
  say('If this address has an account, a code is on its way.');
});

find('have').addEventListener('click', () => {
  if (find<HTMLFormElement>('ask').reportValidity()) present();
});

// present shows the form for a code.
function present() {
  sessionStorage.setItem('asked', input('email').value);
  show(null);
  input('code').focus();
}

// digitsIn makes a code of what people paste: "204-969", full-width or Arabic digits, the whole
// mail. Unicode has the ten digits of each script in a row, 0 first. Of a longer text, its one run
// of exactly six digits is the code.
function digitsIn(text: string): string {
  const isDigit = (codePoint: number) => /\p{Nd}/u.test(String.fromCodePoint(codePoint));
  const plain = text.normalize('NFKC').replace(/\p{Nd}/gu, digit => {
    const codePoint = digit.codePointAt(0)!;
    let zero = codePoint;
    while (isDigit(zero - 1)) zero--;
    return String(codePoint - zero);
  });
  const [code, ...others] = new Set(plain.match(/(?<!\d)\d{6}(?!\d)/g));
  return code && !others.length ? code : plain.replace(/\D/g, '');
}

on('present', async () => {
  const code = digitsIn(input('code').value);
  try {
    show(await call('post', '/auth/otp/validate', { body: { email: input('email').value, code } }));
  } catch (error) {
    // The code may have signed in already: in another tab, or by a request whose answer broke off.
    if (isRefusal(error, 'invalid_code')) await lookAgain();
    if (!shown) throw error;
  }
  await listHubs();
});

// An acceptance is the word of the user whose session it is. So make sure first that this is still
// the one whom the tab shows.
on('accept', async () => {
  const reader = shown?.user.userId;
  await lookAgain();
  if (!shown) return say('The session has ended.');
  if (shown.user.userId !== reader) return say('Another user has signed in, in another tab.');
  await call('post', '/terms/acceptance', { body: { version: find('version').textContent! } });
  show(await call('get', '/auth/session'));
  await listHubs();
});

// Pages: each page but the last names its next one, which begins behind its last hub, whatever
// was added or deleted since. There is no total, since counting costs more as the table grows.
let before: string[] = []; // the after of each page up to this one; the first page needs none
let next: string | null = null;

on('search', () => listHubs());
on('previous', () => listHubs(before.slice(0, -1)));
on('next', () => listHubs([...before, next!]));

async function listHubs(to: string[] = []) {
  if (find('hubs').hidden) return;
  const query: Query<paths['/hubs']['get']> = { limit: 10, orderBy: 'name' };
  const after = to.at(-1);
  if (after) query.after = after;
  if (input('name').value) query['filters[name]'] = input('name').value;
  const page = await call('get', '/hubs', { query });
  before = to;
  next = page.next;
  find('previous').hidden = to.length === 0;
  find('next').hidden = next === null;
  find('list').replaceChildren(...page.items.map(hub => {
    const item = document.createElement('li');
    item.textContent = `${hub.name} (${hub.status})`; // text, never markup
    return item;
  }));
}

on('upload', async () => {
  const chosen = input('file').files![0]!;
  if (!await canRead(chosen)) return say('This file can\'t be read: choose it again.');
  const file = await upload(chosen);
  const link = document.createElement('a');
  // In a tab of its own: once the session has ended, the answer is an error in JSON, which must not
  // replace this page.
  link.target = '_blank';
  link.rel = 'noopener';
  link.href = api + file.path;
  link.textContent = file.name;
  find('uploaded').replaceChildren(link);
  // Whatever its name says, the server goes by the content. To it, HEIC, the format of many
  // phones' photos, is application/octet-stream.
  if (!/^(image\/(png|jpeg|gif|webp)|text\/plain)/.test(file.contentType)) {
    find('uploaded').append(` is a download: the server found ${file.contentType}. Only PNG, JPEG, ` +
      'GIF, WebP and plain text are shown. A photo in HEIC must be exported as JPEG first.');
  }
  if (!file.contentType.startsWith('image/')) return;
  // With crossorigin, the browser asks by CORS and sends the cookie. Without it, Chromium
  // shows no picture from another port of 127.0.0.1.
  const picture = new Image();
  picture.crossOrigin = 'use-credentials';
  picture.alt = 'What was uploaded';
  picture.src = api + file.path;
  find('uploaded').append(picture);
});

on('leave', async () => {
  await call('post', '/auth/logout');
  show(null);
});

// After a reload the cookie may still be there, and whenever the tab comes to the front, it may be
// another user's. Only the server can tell.
async function start() {
  if (document.visibilityState !== 'visible' || running) return;
  running++;
  await lookAgain().catch(explain);
  running--;
}

input('email').value = asked() ?? '';
for (const event of ['pageshow', 'focus', 'visibilitychange']) addEventListener(event, start);
