import createClient from 'openapi-fetch';
import type { paths } from './openapi-typescript';
import { base, fetchWithCookie, flow } from './flow';

const client = createClient<paths>({ baseUrl: base, fetch: fetchWithCookie });

/** The data of an answer, or an error with its code. */
async function need<T>(answer: Promise<{ data?: T; error?: { code: string } }>): Promise<T> {
  const { data, error } = await answer;
  if (error) throw new Error(error.code);
  return data!;
}

flow({
  requestCode: email => need(client.POST('/auth/otp/request', { body: { email } })),
  validateCode: (email, code) => need(client.POST('/auth/otp/validate', { body: { email, code } })),
  getSession: () => need(client.GET('/auth/session')),
  acceptTerms: version => need(client.POST('/terms/acceptance', { body: { version } })),
  listHubs: name => need(client.GET('/hubs', { params: { query: { 'filters[name]': name } } })),
  uploadFile: file => {
    const form = new FormData();
    form.append('file', file);
    // The types of openapi-typescript say string for a binary field.
    return need(client.POST('/files/upload', { body: { file: '' }, bodySerializer: () => form }));
  },
  getFile: (fileId, name) =>
    need(client.GET('/files/{fileId}/{name}', { params: { path: { fileId, name } }, parseAs: 'text' })),
  signOut: () => need(client.POST('/auth/logout')),
});
