import * as api from './hey-api';
import { client } from './hey-api/client.gen';
import { base, fetchWithCookie, flow } from './flow';

client.setConfig({ baseUrl: base, fetch: fetchWithCookie });

/** The data of an answer, or an error with its code. */
async function need<T>(answer: Promise<{ data: T; error: unknown }>): Promise<NonNullable<T>> {
  const { data, error } = await answer;
  if (error) throw new Error((error as api.Problem).code);
  return data!;
}

flow({
  requestCode: email => need(api.requestCode({ body: { email } })),
  validateCode: (email, code) => need(api.validateCode({ body: { email, code } })),
  getSession: () => need(api.getSession()),
  acceptTerms: version => need(api.acceptTerms({ body: { version } })),
  listHubs: name => need(api.listHubs({ query: { 'filters[name]': name } })),
  uploadFile: file => need(api.uploadFile({ body: { file } })),
  getFile: async (fileId, name) => {
    const bytes = await need(api.getFile({ path: { fileId, name }, parseAs: 'blob' }));
    return bytes.text();
  },
  signOut: () => need(api.signOut()),
});
