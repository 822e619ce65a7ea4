// A flow through the API, the same for each generated client. Its arguments are the server's address
// and a user's e-mail address. The code comes on standard input.
import { strict as assert } from 'node:assert';
import { readFileSync } from 'node:fs';

export const base = process.argv[2]!;
const email = process.argv[3]!;

export interface Api {
  requestCode(email: string): Promise<{ codeLength: number }>;
  validateCode(email: string, code: string): Promise<{ user: { email: string } }>;
  getSession(): Promise<{ terms: { version: string; accepted: boolean }; expiresAt: string }>;
  acceptTerms(version: string): Promise<unknown>;
  listHubs(name: string): Promise<{ items: { name: string; status: 'active' | 'archived' }[] }>;
  uploadFile(file: File): Promise<{ fileId: string; name: string; size: number }>;
  getFile(fileId: string, name: string): Promise<string>;
  signOut(): Promise<unknown>;
}

let cookie = '';

/** fetch with the session cookie, which a browser would keep. */
export async function fetchWithCookie(input: RequestInfo | URL, init?: RequestInit): Promise<Response> {
  const request = new Request(input, init);
  request.headers.set('cookie', cookie);
  const response = await fetch(request);
  for (const line of response.headers.getSetCookie()) cookie = line.split(';')[0]!;
  return response;
}

export async function flow(api: Api): Promise<void> {
  const asked = await api.requestCode(email);
  const code = readFileSync(0, 'utf8');
  assert.equal(code.length, asked.codeLength);
  assert.equal((await api.validateCode(email, code)).user.email, email);
  const session = await api.getSession();
  assert.ok(Date.parse(session.expiresAt) > Date.now());
  await api.acceptTerms(session.terms.version);
  assert.equal((await api.getSession()).terms.accepted, true);
  const page = await api.listHubs('harbour');
  assert.deepEqual(page.items.map(hub => hub.name + ' ' + hub.status), ['North Harbour active']);
  const stored = await api.uploadFile(new File(['Ships and ferries.'], 'ships.txt'));
  assert.equal(stored.size, 18);
  assert.equal(await api.getFile(stored.fileId, stored.name), 'Ships and ferries.');
  await api.signOut();
  await assert.rejects(api.getSession(), /unauthenticated/);
}
